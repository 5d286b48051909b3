"""A run on images: what the plan asks of the model, the data and the other parts before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import Problem
from tandem.plan.plan import Plan
from tandem.plan.sft import SftPlan
from tests.plan.folders import MODEL_CONFIG, write_model

Problems = Callable[..., list[Problem]]
Plans = Callable[..., Plan]
SftPlans = Callable[..., SftPlan]

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
SEES = f"{MODEL}.path=sees"


@pytest.fixture
def seen(place: Path) -> Path:
    """A model that sees images, and rows with a column of them and with some in messages."""
    write_model(place / "sees", model_type="qwen2_5_vl", vision_config={"depth": 2}, text_config=MODEL_CONFIG)
    (place / "sees" / "preprocessor_config.json").write_text("{}")
    part = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]}
    for name, row in {
        "column": {"prompt": "What?", "images": ["a.png"]},
        "parts": {"prompt": [part]},
        "film": {"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
    }.items():
        (place / f"{name}.jsonl").write_text(40 * (json.dumps({**row, "answer": "2"}) + "\n"))
    return place


def test_images_in_a_column_and_in_messages_are_planned(seen: Path, plan_of: Plans, sft_plan_of: SftPlans) -> None:
    column = ["data.train_files=[column.jsonl]", "data.image_key=images", "data.chat=true"]
    plan = plan_of(SEES, *column)
    assert plan.problems == () and "images" in plan.source_columns
    assert plan_of(SEES, "data.train_files=[parts.jsonl]").problems == ()
    assert sft_plan_of("model.path=sees", *column).problems == ()
    assert "images" not in plan_of().source_columns


@pytest.mark.parametrize(
    ("words", "key", "reason", "remedy"),
    [
        (["data.train_files=[column.jsonl]"], "data.train_files[0]", "the column images", "data.image_key: images"),
        (["data.train_files=[film.jsonl]"], "data.train_files[0]", "of the type video", "Leave such rows out"),
        (["data.image_key=picture", "data.chat=true"], "data.image_key", "no column 'picture'", "a column of the file"),
        ([f"{ROLLOUT}.name=vllm"], f"{ROLLOUT}.name", "the engine vllm generates on text alone", "hf"),
        ([f"{ROLLOUT}.name=sglang"], f"{ROLLOUT}.name", "the engine sglang generates on text alone", "hf"),
        ([f"{ROLLOUT}.swap={{step: 1, name: vllm}}"], f"{ROLLOUT}.swap.name", "the engine vllm generates", "hf"),
        (["algorithm.adv_estimator=gae", "critic.enable=true"], "critic.enable", "a critic is trained", "false"),
        (["data.on_overlong_prompt=left"], "data.on_overlong_prompt", "prompts are cut", "error or drop"),
        ([f"{MODEL}.freeze=[projector]", f"{MODEL}.lora_rank=4"], f"{MODEL}.freeze", "adapters", "Leave it out"),
    ],
)
def test_what_images_do_not_go_with_is_refused_by_name(
    seen: Path, problems_of: Problems, words: list[str], key: str, reason: str, remedy: str
) -> None:
    found = [problem for problem in problems_of(SEES, *words) if reason in problem.reason]
    assert [problem.key for problem in found] == [key] and remedy in found[0].remedy


def test_a_model_without_its_image_processor_is_refused(
    seen: Path, problems_of: Problems, sft_plan_of: SftPlans
) -> None:
    (seen / "sees" / "preprocessor_config.json").unlink()
    (problem,) = problems_of(SEES)
    assert problem.key == f"{MODEL}.path" and "preprocessor_config.json" in problem.reason
    assert [found.key for found in sft_plan_of("model.path=sees").problems] == ["model.path"]


@pytest.mark.parametrize("key", ["image_key=prompt", "image_max_pixels=9", "image_max_bytes=9"])
def test_keys_of_images_are_refused_where_the_model_sees_none(
    seen: Path, problems_of: Problems, sft_plan_of: SftPlans, key: str
) -> None:
    for found in (problems_of(f"data.{key}"), sft_plan_of(f"data.{key}").problems):
        (problem,) = (problem for problem in found if "images need a model" in problem.reason)
        assert problem.key == f"data.{key.partition('=')[0]}" and "qwen2_5_vl" in problem.remedy


def test_only_a_model_that_sees_has_parts_to_freeze(seen: Path, problems_of: Problems, plan_of: Plans) -> None:
    (problem,) = problems_of(f"{MODEL}.freeze=[vision_tower]")
    assert problem.key == f"{MODEL}.freeze"
    assert plan_of(SEES, f"{MODEL}.freeze=[vision_tower, projector]").problems == ()


def test_a_language_model_that_sees_is_run_on_text_where_something_else_is(
    seen: Path, problems_of: Problems, plan_of: Plans
) -> None:
    write_model(seen / "both", model_type="qwen3_5", vision_config={"depth": 2}, text_config=MODEL_CONFIG)
    words = [f"{MODEL}.path=both", "data.on_overlong_prompt=left"]
    plan = plan_of(*words)
    assert plan.problems == () and "images" not in plan.source_columns
    (problem,) = problems_of(*words, "data.train_files=[column.jsonl]")
    assert "text alone" in problem.reason
    asked = problems_of(*words, "data.train_files=[column.jsonl]", "data.image_key=images", "data.chat=true")
    assert "data.on_overlong_prompt" in [problem.key for problem in asked]
