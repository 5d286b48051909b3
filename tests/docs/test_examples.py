"""The examples that are written as programs of another system, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem import DataProto, build_reward_manager, load_config
from tandem.config.schema import Config
from tandem.models.tokenizer import encode_text, load_tokenizer
from tandem.plan.plan import compile_plan
from tests.docs.conftest import ROOT, save_tiny_model

pytestmark = pytest.mark.usefixtures("warm_python")
EXAMPLES = ROOT / "examples"


def run(place: Path, script: Path, *words: str) -> str:
    """The script in a process of its own; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(place / "cache")}
    command = [sys.executable, str(script), *words]
    result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_a_loop_of_ones_own_learns_under_the_keyword_reward(reader: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "own_loop" / "ppo_trainer.yaml").read_text("utf-8"))
    config["actor_rollout_ref"]["actor"]["optim"]["lr"] = 0.01
    config["data"] = {**yaml.safe_load(Path("run.yaml").read_text())["data"], "train_batch_size": 10}
    config["trainer"]["total_epochs"] = 5
    Path("own.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), "utf-8")
    printed = run(reader, EXAMPLES / "own_loop" / "loop.py", "own.yaml")
    rewards = [float(number) for number in re.findall(r"^reward ([\d.]+)$", printed, re.MULTILINE)]
    assert len(rewards) == 5 * 4
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3


def test_the_keyword_reward_is_found_as_a_plugin_too(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_loop"))
    words = ["plugins=[keyword_reward]", "reward_manager={type: keyword_reward, keyword: b}"]
    config = load_config("run.yaml", words, kind=Config)
    tokenizer = load_tokenizer("model")
    answers = [torch.tensor(encode_text(tokenizer, text)) for text in ("abc", "a", "xxb")]
    rewards = build_reward_manager(config.reward_manager, inline=True)
    assert rewards(DataProto({"responses": answers}, tokenizer=tokenizer)).tolist() == [1.0, 0.0, 1.0]


def test_the_built_in_loop_takes_the_same_config(reader: Path) -> None:
    plan = compile_plan(load_config(EXAMPLES / "own_loop" / "ppo_trainer.yaml", kind=Config))
    assert plan.problems == plan.later == ()


def test_a_trainer_and_a_data_source_of_ones_own_tune_and_save(tmp_path: Path) -> None:
    for file in (EXAMPLES / "own_sft").iterdir():
        if file.suffix in (".py", ".yaml"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_tiny_model(tmp_path / "model")
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(4)]
    for name in ("train", "val"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    run(tmp_path, Path("main.py"))
    final = tmp_path / "runs" / "own_sft" / "final"
    tuned, before = (AutoModelForCausalLM.from_pretrained(folder) for folder in (final, tmp_path / "model"))
    assert AutoTokenizer.from_pretrained(final).decode([5, 6])
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert not tuned.state_dict()[weight].equal(before.state_dict()[weight])  # the adapters, merged
    steps = (tmp_path / "runs" / "own_sft" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 5
