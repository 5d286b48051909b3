"""The first prompt and its ground truth are read by the plan: a run would find what is wrong with them late."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.base.errors import Problem

Problems = Callable[..., list[Problem]]
USER = {"role": "user", "content": "hi"}


def write(place: Path, **row: Any) -> str:
    (place / "first.jsonl").write_text((json.dumps({"prompt": "1+1=", "answer": "2"} | row) + "\n") * 20)
    return "data.train_files=[first.jsonl]"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (["a", "b"], "message 1 is a str, not a mapping"),
        ([{"content": "a"}], "message 1 has no role"),
        ([{"role": "user", "content": None}], "message 1 (user) has no content"),
        ([USER, {"role": "assistant", "content": "2"}], "the last message is the assistant's"),
        (json.dumps([USER]), "which is a list of messages written as text"),
        (str([USER]), "which is a list of messages written as text"),
        ('\n[ {"content": "a", "role": "user"}]', "which is a list of messages written as text"),
    ],
)
@pytest.mark.parametrize("chat", ["true", "false"])
def test_a_first_prompt_that_is_none_is_refused(
    place: Path, problems_of: Problems, prompt: object, reason: str, chat: str
) -> None:
    (problem,) = problems_of(write(place, prompt=prompt), f"data.chat={chat}")
    assert problem.key == "data.prompt_key" and "first.jsonl, row 1: " in problem.reason and reason in problem.reason
    assert problems_of(write(place, prompt=prompt), f"data.chat={chat}", "data.on_bad_row=drop") == []


@pytest.mark.parametrize("prompt", ["[1, 2]", '{"role": 3}', "[{'x': 1}] is a list", [USER]])
def test_what_only_looks_like_messages_is_a_prompt(place: Path, problems_of: Problems, prompt: object) -> None:
    assert problems_of(write(place, prompt=prompt), "data.chat=true") == []


@pytest.mark.parametrize(
    ("reward", "answer", "reason"),
    [
        ("exact", None, "column 'answer' is null"),
        ("gsm8k", "none at all", "ground_truth 'none at all' has no number: gsm8k compares numbers"),
        ("gsm8k", float("nan"), "ground_truth 'nan' has no number"),
        ("qa_em", "...", "has no words: qa_em compares words"),
        ("multiple_choice", "Rome", "ground_truth"),
        ("code", 3, "ground_truth"),
    ],
)
def test_a_ground_truth_that_the_reward_can_not_read_is_refused(
    place: Path, problems_of: Problems, reward: str, answer: object, reason: str
) -> None:
    found = problems_of(write(place, answer=answer), f"reward_manager={{type: {reward}}}")
    (problem,) = [problem for problem in found if problem.key == "data.answer_key"]
    assert problem.value == "answer" and reason in problem.reason and "right answers" in problem.remedy


@pytest.mark.parametrize("answer", [b"2", datetime.date(2026, 1, 1)])
def test_one_that_no_checkpoint_can_hold_is_refused(place: Path, problems_of: Problems, answer: object) -> None:
    pq.write_table(pa.table({"prompt": ["1+1="] * 20, "answer": [answer] * 20}), place / "first.parquet")
    (problem,) = problems_of("data.train_files=[first.parquet]")
    assert problem.key == "data.answer_key" and "can't be saved as JSON" in problem.reason


@pytest.mark.parametrize(
    ("reward", "answer"),
    [("exact", ""), ("gsm8k", 7), ("gsm8k", "#### 7"), ("math_dapo", "x"), ("multiple_choice", "B")],
)
def test_what_the_reward_can_read_is_taken(place: Path, problems_of: Problems, reward: str, answer: object) -> None:
    assert problems_of(write(place, answer=answer), f"reward_manager={{type: {reward}}}") == []


@pytest.mark.parametrize(
    ("word", "key", "reason"),
    [
        ("data.template='{prompt:.1f}'", "data.template", "can't show {'prompt': '1+1='}"),
        ("data.template='{prompt}{hint}'", "data.template", "column 'hint' is null"),
        ("data.data_source_key=topic", "data.data_source_key", "is {'name': 'sums'}, and a name is a text or a number"),
        ("data.uid_key=tags", "data.uid_key", "is ['a'], and a name is a text or a number"),
        ("data.uid_key=hint", "data.uid_key", "column 'hint' is null"),
    ],
)
def test_names_and_templates_are_tried_on_the_first_row(
    place: Path, problems_of: Problems, word: str, key: str, reason: str
) -> None:
    (problem,) = problems_of(write(place, topic={"name": "sums"}, tags=["a"], hint=None), word)
    assert problem.key == key and "first.jsonl, row 1: " in problem.reason and reason in problem.reason


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("prompt", "words", "key"),
    [
        ("hi", ["data.chat=true", "data.system_prompt=Be brief"], "data.system_prompt"),
        ([USER], ["data.chat=true", "data.system_prompt=Be brief"], "data.system_prompt"),
        ([{"role": "system", "content": "a"}, USER], [], "data.prompt_key"),
        ("hi", ["data.chat=true"], None),
        ([USER], [], None),
    ],
)
def test_messages_that_the_chat_template_refuses_are_told_in_its_words(
    place: Path, problems_of: Problems, prompt: object, words: list[str], key: str | None
) -> None:
    (place / "model" / "chat_template.jinja").write_text(NO_SYSTEM)
    found = problems_of(write(place, prompt=prompt), *words)
    assert [problem.key for problem in found] == ([] if key is None else [key])
    assert (
        key is None or "the chat template refuses messages with roles system, user: no system role" in found[0].reason
    )


def test_the_first_row_that_is_held_out_is_read_too(place: Path, problems_of: Problems) -> None:
    held_out = write(place, answer="none at all").replace("train_files", "val_files")
    (problem,) = problems_of(held_out, "evaluation.interval=5", "reward_manager.type=gsm8k")
    assert problem.key == "data.answer_key" and "first.jsonl, row 1: " in problem.reason
