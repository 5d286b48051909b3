"""A run with everything in place, from which a test takes one thing away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.base.errors import ConfigError, Problem
from tandem.config.load import load_words
from tandem.config.schema import Config, SftConfig
from tandem.plan.plan import Plan, compile_plan
from tandem.plan.sft import SftPlan, compile_sft_plan
from tests.plan.folders import MODEL_CONFIG, write_model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the run, and the current one: a model, data, a scorer, a plugin, a config."""
    write_model(tmp_path / "model", **MODEL_CONFIG)
    rows = [{"prompt": f"{x}+1=", "answer": str(x + 1), "topic": {"name": "sums"}} for x in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "9+9=", "answer": "18"}) + "\n")
    tree = {
        "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}, "rollout": {"n": 4}},
        "data": {
            "train_files": [str(tmp_path / "train.jsonl")],
            "train_batch_size": 8,
            "max_prompt_length": 128,
            "max_response_length": 128,
        },
        "trainer": {"total_steps": 20, "output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def plan_of(place: Path) -> Callable[..., Plan]:
    """The plan of the run with some words changed."""

    def compiled(*words: str) -> Plan:
        return compile_plan(load_words([str(place / "run.yaml"), *words], Config))

    return compiled


@pytest.fixture
def sft_plan_of(place: Path) -> Callable[..., SftPlan]:
    """The plan of an SFT run with some words changed."""
    data: dict[str, Any] = {"train_files": [str(place / "train.jsonl")], "response_key": "answer", "max_length": 64}
    tree = {"model": {"path": str(place / "model")}, "data": data, "trainer": {"output_dir": str(place / "out")}}
    (place / "sft.yaml").write_text(yaml.safe_dump(tree))

    def compiled(*words: str) -> SftPlan:
        return compile_sft_plan(load_words([str(place / "sft.yaml"), *words], SftConfig))

    return compiled


@pytest.fixture
def problems_of(place: Path) -> Callable[..., list[Problem]]:
    """All problems of the run with some words changed, whether the document or the plan finds them."""

    def found(*words: str) -> list[Problem]:
        try:
            return list(compile_plan(load_words([str(place / "run.yaml"), *words], Config)).problems)
        except ConfigError as error:
            return error.problems

    return found
