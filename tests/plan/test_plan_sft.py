"""The plan of an SFT run, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import ConfigError
from tandem.plan.sft import SftPlan


def test_an_sft_plan_counts_updates(sft_plan_of: Callable[..., SftPlan]) -> None:
    plan = sft_plan_of("trainer.total_epochs=2")
    assert plan.problems == ()
    assert (plan.rows, plan.batch_examples, plan.updates) == (40, 32, 2)
    assert json.loads(plan.to_json())["kind"] == "sft"
    plan.require_runnable()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["data.response_key=anser"], "data.response_key"),
        (["data.messages_key=messages"], "data.messages_key"),
        (["data.train_files=[]"], "data.train_files"),
        (["data.val_files=[absent.jsonl]"], "data.val_files[0]"),
        (["data.max_length=2000"], "data.max_length"),
        (["data.max_token_len_per_gpu=63"], "data.max_token_len_per_gpu"),
        (["model.path=./absent"], "model.path"),
        (["model.path=''"], "model.path"),
        (["model.new={alphabet: abc}"], "model.new"),
        (["model={new: {alphabet: abc, hidden_size: 10, num_heads: 4}}"], "model.new.num_heads"),
        (["model={new: {alphabet: abc, max_position_embeddings: 32}}"], "data.max_length"),
        (["evaluation.interval=5"], "evaluation.interval"),
        (["evaluation.stop_at_accuracy=0.5"], "evaluation.stop_at_accuracy"),
        (["optim.warmup_steps=1"], "optim.warmup_steps"),
        (["trainer.logger=[wandbb]"], "trainer.logger[0]"),
        (["trainer.resume=absent"], "trainer.resume"),
        (["data.train_batch_size=64"], "data.train_batch_size"),
        (["data.mix=[{files: train.jsonl}]"], "data.mix"),
        (["data.train_files=[]", "data.mix=[{files: absent.jsonl}]"], "data.mix[0].files[0]"),
        (["data.train_files=[]", "data.mix=[{files: train.jsonl, response_key: anser}]"], "data.mix[0].response_key"),
        (["data.train_files=[]", "data.mix=[{files: train.jsonl, messages_key: talk}]"], "data.mix[0].messages_key"),
        (["data.train_files=[]", "data.mix=[{files: train.jsonl}, {files: train.jsonl}]"], "data.mix[1].name"),
        (["data.train_files=[]", "data.mix=[{files: []}]"], "data.mix[0].files"),
        (
            ["data.train_files=[]", "data.mix=[{files: train.jsonl}]", "data.val_files=[train.jsonl]"],
            "data.val_files[0]",
        ),
        (["data.tools_key=tools"], "data.tools_key"),
        (["data.tools_key=tools", "data.chat=true"], "data.tools_key"),
    ],
)
def test_sft_refusals(place: Path, sft_plan_of: Callable[..., SftPlan], words: list[str], key: str) -> None:
    (place / "a.jsonl").write_text((place / "train.jsonl").read_text())
    plan = sft_plan_of(*words)
    assert [problem.key for problem in plan.problems] == [key]
    assert plan.problems[0].remedy
    with pytest.raises(ConfigError):
        plan.require_runnable()


def test_a_model_that_is_made_needs_no_folder(sft_plan_of: Callable[..., SftPlan]) -> None:
    assert sft_plan_of("model={new: {alphabet: abc}}").problems == ()
