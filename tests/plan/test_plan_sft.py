"""The plan of an SFT run, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        (["model={new: {alphabet: abc, hidden_size: 12, num_heads: 4}}"], "model.new.num_heads"),
        (["model={new: {alphabet: abca}}"], "model.new.alphabet"),
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
        (["data.response_key=prompt"], "data.response_key"),
        (["data.train_files=[]", "data.mix=[{files: a.jsonl, response_key: prompt}]"], "data.mix[0].response_key"),
    ],
)
def test_sft_refusals(place: Path, sft_plan_of: Callable[..., SftPlan], words: list[str], key: str) -> None:
    (place / "a.jsonl").write_text((place / "train.jsonl").read_text())
    plan = sft_plan_of(*words)
    assert [problem.key for problem in plan.problems] == [key]
    assert plan.problems[0].remedy
    with pytest.raises(ConfigError):
        plan.require_runnable()


@pytest.mark.parametrize(
    ("first", "words", "key", "told"),
    [
        ({"prompt": "1+1=", "answer": 2}, [], "data.response_key", "2 is not text"),
        ({"prompt": None, "answer": "2"}, [], "data.prompt_key", "None is not text"),
        ({"talk": "hello"}, ["data.messages_key=talk"], "data.messages_key", "a list of messages"),
        ({"talk": []}, ["data.messages_key=talk"], "data.messages_key", "the list of messages is empty"),
        (
            {"talk": [{"role": "human", "content": "q"}]},
            ["data.messages_key=talk"],
            "data.messages_key",
            "are human), so",
        ),
        ({"talk": [{"from": "human"}]}, ["data.messages_key=talk"], "data.messages_key", "message 1 has no role"),
    ],
)
def test_the_first_example_is_read_as_what_it_must_be(
    place: Path, sft_plan_of: Callable[..., SftPlan], first: dict[str, Any], words: list[str], key: str, told: str
) -> None:
    file = place / "first.jsonl"
    file.write_text(json.dumps(first) + "\n")
    (problem,) = sft_plan_of("data.train_batch_size=1", f"data.train_files=[{file}]", *words).problems
    assert problem.key == key and told in problem.reason and "row 1" in problem.reason
    held = sft_plan_of(f"data.val_files=[{file}]", *words).problems
    assert held[-1].key == key and told in held[-1].reason
    parts = ("data.train_files=[]", f"data.mix=[{{files: {file}}}]", "data.train_batch_size=1")
    mixed = sft_plan_of(*parts, *words).problems
    assert [p.key for p in mixed] == [key.replace("data.", "data.mix[0].")]
    left_out = sft_plan_of("data.train_batch_size=1", f"data.train_files=[{file}]", "data.on_bad_row=drop", *words)
    assert left_out.problems == ()


def test_a_model_that_is_made_needs_no_folder(sft_plan_of: Callable[..., SftPlan]) -> None:
    assert sft_plan_of("model={new: {alphabet: abc}}").problems == ()


TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}END{% endfor %}"


@pytest.mark.parametrize(
    ("end", "ends", "told"),
    [
        ("{{ eos_token }}\n", {"eos_token": "<eos>"}, False),
        ("<|im_end|>\n", {"eos_token": "<eos>"}, True),
        ("<|im_end|>", {"eos_token": "<eos>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}, False),
        ("", {"eos_token": {"content": "<eos>"}}, True),
        ("{{ raise_exception('never') }}", {"eos_token": "<eos>"}, False),
    ],
)
def test_turns_that_end_with_no_end_token_are_noted(
    place: Path, sft_plan_of: Callable[..., SftPlan], end: str, ends: dict[str, Any], told: bool
) -> None:
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 40
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "model" / "chat_template.jinja").write_text(TURN.replace("END", end))
    (place / "model" / "tokenizer_config.json").write_text(json.dumps(ends))
    (place / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    notes = sft_plan_of("data.messages_key=messages").notes
    assert any("no end token of the model" in note and "eos_token" in note for note in notes) is told
