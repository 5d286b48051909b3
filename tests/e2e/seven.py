"""The task of the end-to-end tests: ``"7>"`` is to be answered by ``7777``; what a run of it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control.entry import LOOPS
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tandem.observe.metrics import METRICS_FILE, ROLLOUTS_FILE, read_rows
from tandem.plan.plan import compile_plan
from tandem.roles.rank_calls import LocalRank
from tandem.roles.train_rank import TrainRank
from tandem.session.build.run import build_session
from tandem.session.session import Session
from tandem.train.engine import FsdpEngine

ALPHABET = "\n0123456789>"
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 168,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


def make_task(folder: Path) -> Path:
    """The model, prompts and the config of a run; the path of the config."""
    tokenizer = character_tokenizer(ALPHABET, eos="\n", pad=None)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = new_model({**SHAPE, **ids, "vocab_size": len(tokenizer)}, seed=0)
    save_pretrained_atomic(model, tokenizer, folder / "model")
    write_rows(folder / "train.jsonl", [{"prompt": f"{d}>", "answer": str(d) * 4} for d in range(10)])
    tree = {
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {"optim": {"lr": 3.0e-3, "betas": [0.9, 0.95]}},
            "rollout": {"n": 8},
        },
        "algorithm": {"adv_estimator": {"type": "grpo", "norm_adv_by_std": False}},
        "reward_manager": {"type": "match_fraction"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "train_batch_size": 16,
            "max_prompt_length": 2,
            "max_response_length": 4,
        },
        "trainer": {"total_steps": 60, "logger": [], "output_dir": str(folder / "run")},
        "runtime": {"torch_threads": 1, "threads": True},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A JSON-lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class Run:
    """A finished run."""

    session: Session[Any]
    output: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_rows(self.output / METRICS_FILE)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return self.column("reward/mean")

    def column(self, key: str) -> list[float]:
        """One metric of each step that has it."""
        return [row[key] for row in self.rows if key in row]

    @property
    def prompts(self) -> list[list[str]]:
        """Prompts of each step, as far as they were recorded."""
        steps: dict[int, list[str]] = {}
        for row in read_rows(self.output / ROLLOUTS_FILE):
            steps.setdefault(int(str(row["step"])), []).append(str(row["prompt"]))
        return [steps[step] for step in sorted(steps)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The actor's weights by Hugging Face name."""
        return {name: tensor.clone() for name, tensor in self.session.composite.actor.export()}


def training_engine(session: Session[Any]) -> FsdpEngine:
    """The engine of the only rank."""
    return training_rank(session).engine


def training_rank(session: Session[Any]) -> TrainRank:
    """The only rank, which is in this process."""
    (handle,) = session.composite.actor.ranks._ranks
    assert isinstance(handle, LocalRank)
    return handle.rank


def prepare(*words: str | Path) -> Session[Any]:
    """A session built the way that the command builds it."""
    config = load_words([str(word) for word in words], Config)
    return build_session(config, compile_plan(config))


def train(*words: str | Path) -> Run:
    """Run a config to its end."""
    session = prepare(*words)
    with session.run.running():
        LOOPS[session.plan.loop](session)
    return Run(session, session.run.output_dir)


@contextmanager
def started(*words: str | Path) -> Iterator[Session[Any]]:
    """A session that the test drives itself."""
    session = prepare(*words)
    with session.run.log:
        try:
            yield session
        finally:
            session.rewards.close()


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of any weight."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)
