"""Slips of the pen that a run would take as they stand: each is named before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import Problem
from tandem.config.load import load_words
from tandem.config.schema import Config, SftConfig
from tandem.plan.plan import Plan

Problems = Callable[..., list[Problem]]
OPTIM = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize("value", ["maybe", "1", "null", "[true]"])
def test_a_switch_that_stands_for_another_key_is_true_or_false(problems_of: Problems, value: str) -> None:
    (problem,) = problems_of(f"trainer.use_tensorboard={value}")
    assert (problem.key, problem.reason) == ("trainer.use_tensorboard", "not true or false")


def test_a_beta_and_the_betas_are_one_thing(problems_of: Problems) -> None:
    (problem,) = problems_of("--adam-beta1", "0.9", f"{OPTIM}.betas=[0.8, 0.99]")
    assert (problem.key, problem.value) == (f"{OPTIM}.adam_beta1", 0.9) and "0.8" in problem.reason
    assert not problems_of("--adam-beta1", "0.8", "--adam-beta2", "0.99", f"{OPTIM}.betas=[0.8, 0.99]")


@pytest.mark.parametrize(
    ("path", "reason"), [("", "no model"), ("nowhere", "no such folder"), ("./nowhere", "no such folder")]
)
def test_the_model_of_a_reward_is_looked_for_as_any_other(problems_of: Problems, path: str, reason: str) -> None:
    (problem,) = problems_of(f"reward_manager={{type: reward_model, path: '{path}'}}")
    assert problem.key == "reward_manager.path" and reason in problem.reason


@pytest.mark.parametrize("path", ["$UNSET/run", "runs/${NAME}", "$HOME"])
def test_no_folder_is_called_like_a_variable(problems_of: Problems, path: str) -> None:
    (problem,) = problems_of(f"trainer.output_dir='{path}'")
    assert problem.key == "trainer.output_dir" and "nothing is put in for $" in problem.reason
    assert not problems_of("trainer.output_dir='runs/5$'")


def written(place: Path, *rows: str) -> str:
    (place / "slip.jsonl").write_text("".join(row + "\n" for row in rows))
    return f"data.train_files=[{place / 'slip.jsonl'}]"


@pytest.mark.parametrize(
    "row", ['{"prompt": "a", "answer": "1", "prompt": "b"}', '{"prompt": "a", "answer": {"x": 1, "y": 2, "x": 3}}']
)
def test_a_key_that_stands_twice_in_a_row_is_no_key(place: Path, problems_of: Problems, row: str) -> None:
    (problem,) = problems_of(written(place, *[row] * 8), "trainer.total_epochs=20")
    assert problem.key == "data.train_files[0]" and "stands twice" in problem.reason
    good = '{"prompt": "a", "answer": "1"}'
    assert not problems_of(written(place, row, *[good] * 8), "trainer.total_epochs=20", "data.on_bad_row=drop")


@pytest.mark.parametrize("prompt", [17, None, "", [], {"role": "user"}, True])
def test_a_first_prompt_that_is_none_is_told_before_the_run(place: Path, problems_of: Problems, prompt: Any) -> None:
    rows = [json.dumps({"prompt": prompt, "answer": "1"})] * 8
    (problem,) = problems_of(written(place, *rows), "trainer.total_epochs=20")
    assert problem.key == "data.prompt_key" and "row 1" in problem.reason
    assert not problems_of(written(place, *rows), "trainer.total_epochs=20", "data.on_bad_row=drop")


def test_a_label_is_not_the_answer(place: Path, problems_of: Problems) -> None:
    data = written(place, *[json.dumps({"prompt": "a", "response": "b", "good": True})] * 8)
    words = [data, "algorithm.policy_loss.type=kto", "trainer.total_epochs=20"]
    assert not problems_of(*words, "data.label_key=good")
    (problem,) = problems_of(*words, "data.label_key=response")
    assert problem.key == "data.label_key"


def test_words_alone_tell_a_fine_tuning_from_a_training(place: Path) -> None:
    words = [f"model.path={place / 'model'}", f"data.train_files={place / 'train.jsonl'}", "data.response_key=answer"]
    assert isinstance(load_words(words), SftConfig)
    assert isinstance(load_words([f"actor_rollout_ref.{words[0]}", words[1]]), Config)


def test_a_file_that_is_named_twice_is_told(place: Path, plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(f"data.train_files=[{place / 'train.jsonl'}, ./train.jsonl]")
    assert any("2 times" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("[all-linear]", "Write all-linear without brackets, or take it out of the list"),
        ("q_proj", "Write [q_proj]; or all-linear"),
        ("all-liner", "Did you mean 'all-linear'? Choices: all-linear"),
    ],
)
def test_lora_targets_in_another_form_say_what_to_write(
    problems_of: Callable[..., list[Problem]], written: str, remedy: str
) -> None:
    key = "actor_rollout_ref.model.lora_target_modules"
    (problem,) = problems_of("actor_rollout_ref.model.lora_rank=4", f"{key}={written}")
    assert (problem.key, problem.remedy) == (key, remedy)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"r": 0}, "the rank 0, which is no whole number of 1 to 65536"),
        ({"r": "4"}, "the rank '4'"),
        ({"rank_pattern": {"q_proj": -1}}, "the rank -1"),
        ({"lora_alpha": 0}, "the lora_alpha 0, which is no finite number above 0: nothing of it would be learned"),
        ({"lora_alpha": float("nan")}, "the lora_alpha nan"),
        ({"alpha_pattern": {"q_proj": 0}}, "the lora_alpha 0"),
        ({"lora_dropout": 2}, "the lora_dropout 2"),
        ({"use_rslora": "false"}, "the use_rslora 'false'"),
        ({"target_modules": []}, "no target_modules"),
        ({}, None),
    ],
    ids=str,
)
def test_numbers_that_no_adapter_has_are_refused(
    place: Path, problems_of: Problems, changes: dict[str, Any], fault: str | None
) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "rank_pattern": {}, **changes}
    (place / "lora").mkdir()
    (place / "lora" / "adapter_config.json").write_text(json.dumps(config))
    found = problems_of("actor_rollout_ref.model.adapter_path=lora")
    assert [problem.key for problem in found] == ([] if fault is None else ["actor_rollout_ref.model.adapter_path"])
    assert fault is None or fault in found[0].reason
