"""A folder such as a reader of the documentation would stand in: a tiny model, small data files, the examples."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tandem.algorithms import ADVANTAGES, DISTILLATIONS, KL_TYPES, POLICY_LOSSES
from tandem.base.registry import Registry
from tandem.base.run_folder import begin
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tandem.observe.trackers import TRACKERS
from tandem.reward.registry import REWARDS
from tandem.rollout.registry import engines
from tandem.stages.registry import STAGES

ROOT = Path(__file__).parents[2]
REGISTRIES: tuple[Registry[Any], ...] = (
    ADVANTAGES,
    DISTILLATIONS,
    KL_TYPES,
    POLICY_LOSSES,
    TRACKERS,
    REWARDS,
    STAGES,
    engines,
)
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}{# tools #}"
)
RUN = {
    "actor_rollout_ref": {"model": {"path": "model"}, "actor": {"optim": {"lr": 3.0e-3}}, "rollout": {"n": 8}},
    "algorithm": {"adv_estimator": "grpo"},
    "reward_manager": {"type": "match_fraction"},
    "data": {
        "train_files": ["train.jsonl"],
        "train_batch_size": 4,
        "max_prompt_length": 8,
        "max_response_length": 4,
    },
    "trainer": {"total_steps": 3, "output_dir": "runs/first"},
}
SFT = {
    "model": {"path": "model"},
    "data": {"train_files": ["pairs.jsonl"], "train_batch_size": 4, "max_length": 32},
    "trainer": {"total_steps": 3, "output_dir": "runs/sft"},
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def save_tiny_model(folder: Path) -> None:
    """A random Llama that knows printable ASCII, one token a character, with a chat template."""
    tokenizer = character_tokenizer("\n" + "".join(map(chr, range(32, 127))), eos="\n", pad=None)
    tokenizer.chat_template = CHAT
    shape = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    save_pretrained_atomic(new_model(shape, seed=0), tokenizer, folder)


@pytest.fixture(scope="session")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, made once; tests get copies."""
    place = tmp_path_factory.mktemp("reader")
    save_tiny_model(place / "model")
    quickstart = ("quickstart/sft", "quickstart/grpo", "quickstart/hybrid", "distillation/small-sft")
    for run in (*quickstart, "calculator/sft", "guess/sft"):
        begin(place / "runs" / run)
        shutil.copytree(place / "model", place / "runs" / run / "final")
    digits = [{"prompt": f"{d}>", "answer": str(d) * 4, "question": f"{d}?", "topic": "digits"} for d in range(10)]
    write_rows(place / "train.jsonl", digits * 4)
    write_rows(place / "val.jsonl", [{**row, "prompt": f"{row['answer'][0]}->"} for row in digits])
    write_rows(place / "pairs.jsonl", [{"prompt": row["prompt"], "response": row["answer"]} for row in digits])
    write_rows(place / "pairs_val.jsonl", [{"prompt": f"{row['answer']}>", "response": "7"} for row in digits])
    pairs = [{"prompt": f"{d}>", "chosen": str(d) * 3, "rejected": str(9 - d) * 3} for d in range(10)]
    write_rows(place / "preferences.jsonl", pairs * 4)
    write_rows(place / "preferences_val.jsonl", [{**row, "prompt": f"{row['prompt'][0]}->"} for row in pairs])
    write_rows(
        place / "labels.jsonl", [{"prompt": "7>", "response": str(d) * 3, "good": d == 7} for d in range(10)] * 4
    )
    turns = [{"role": "user", "content": "7>"}, {"role": "assistant", "content": "7777"}]
    write_rows(place / "chats.jsonl", [{"messages": turns}] * 40)
    pq.write_table(pa.Table.from_pylist(digits * 4), place / "train.parquet")
    (place / "run.yaml").write_text(yaml.safe_dump(RUN))
    (place / "sft.yaml").write_text(yaml.safe_dump(SFT))
    (place / "empty.jsonl").write_text("")
    for engine, version in (("vllm", "0.32.0"), ("sglang", "0.5.23")):
        furnish_engine(place / ".engines" / engine, engine, version)
    for name in ("examples", "tools", "bench", "Makefile", "pyproject.toml"):
        (place / name).symlink_to(ROOT / name)
    return place


def furnish_engine(folder: Path, name: str, version: str) -> None:
    """An environment that a plan can ask whether it has an engine; nothing of it is imported."""
    python, site = folder / "bin" / "python", folder / "site"
    (site / f"{name}-{version}.dist-info").mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (site / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)


@pytest.fixture
def reader(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh copy of the folder to stand in; what the blocks register or import is forgotten afterwards."""
    place = tmp_path / "reader"
    shutil.copytree(furnished, place, symlinks=True)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    # A plan never asks the hub; offline it would refuse the hub ids that the pages name.
    monkeypatch.delenv("HF_HUB_OFFLINE")
    registered = [(registry, dict(registry._entries)) for registry in REGISTRIES]
    modules = set(sys.modules)
    yield place
    for registry, entries in registered:
        registry._entries = entries
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(place):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def only_what_tandem_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages tell what there is: what other tests have registered in this process is not."""
    for registry in (ADVANTAGES, DISTILLATIONS, POLICY_LOSSES, KL_TYPES, REWARDS, engines):
        own = {k: entry for k, entry in registry._entries.items() if entry.target.__module__.startswith("tandem.")}
        monkeypatch.setattr(registry, "_entries", own)
