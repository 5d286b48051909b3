"""Images where nobody reads them: a model of another family, a column or a message with some is refused before anything
is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tandem.base.errors import DataError, Problem
from tandem.data.chat import checked_messages
from tandem.models.families import AS_TEXT, IMAGE_FAMILIES
from tandem.plan.plan import Plan
from tandem.plan.sft import SftPlan
from tests.plan.folders import MODEL_CONFIG, write_model

Problems = Callable[..., list[Problem]]
Plans = Callable[..., Plan]
SftPlans = Callable[..., SftPlan]

MODEL = "actor_rollout_ref.model.path"
VISION = {"model_type": "idefics3", "vision_config": {"depth": 2}, "text_config": MODEL_CONFIG}
PREFERENCES = "algorithm.policy_loss.type=dpo"


def unseen(problems: Sequence[Problem]) -> Problem:
    """The one problem that is about more than text."""
    (found,) = (problem for problem in problems if "text alone" in problem.reason)
    return found


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "How many?"}, *parts]}]


PARTS = [
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "video", "video": "a.mp4"},
    {"type": "input_audio", "input_audio": {"data": ""}},
    {"image": "a.png"},
]


def test_a_model_that_reads_images_is_refused_wherever_it_is_named(
    place: Path, problems_of: Problems, sft_plan_of: SftPlans
) -> None:
    write_model(place / "sees", **VISION)
    for words, key in (
        ([f"{MODEL}=sees"], MODEL),
        ([f"{MODEL}=sees", PREFERENCES, "data.chosen_key=prompt", "data.rejected_key=answer"], MODEL),
        (["algorithm.adv_estimator=gae", "critic.enable=true", "critic.model.path=sees"], "critic.model.path"),
        (["algorithm.distillation.type=reverse_kl", "actor_rollout_ref.teacher.path=sees"], None),
    ):
        found = [problem for problem in problems_of(*words) if "more than text" in problem.reason]
        assert [problem.key for problem in found] == [key or "actor_rollout_ref.teacher.path"]
        assert "vision_config" in found[0].reason and "idefics3" in found[0].reason
    (problem,) = sft_plan_of("model.path=sees").problems
    assert "vision_config" in problem.reason


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("vision_config", {"depth": 2}),
        ("audio_config", {"layers": 2}),
        ("visual", {"width": 8}),
        ("vit_config", {"depth": 2}),
        ("mm_vision_tower", "openai/clip"),
        ("thinker_config", {"audio_config": {"layers": 2}, "text_config": MODEL_CONFIG}),
    ],
)
def test_a_section_for_other_senses_is_refused_whatever_it_is_called(
    place: Path, problems_of: Problems, key: str, section: object
) -> None:
    write_model(place / "sees", model_type="seer", **MODEL_CONFIG, **{key: section})
    found = [problem for problem in problems_of(f"{MODEL}=sees") if "more than text" in problem.reason]
    assert [problem.key for problem in found] == [MODEL] and key in found[0].reason


@pytest.mark.parametrize("empty", [None, {}])
def test_an_empty_section_and_the_number_of_an_image_token_are_for_nothing(
    place: Path, problems_of: Problems, empty: object
) -> None:
    more = {"vision_config": empty, "mm_vision_tower": None, "image_token_id": 7, "rope_config": {"base": 1}}
    write_model(place / "reads", model_type="llama", **MODEL_CONFIG, **more)
    assert problems_of(f"{MODEL}=reads") == []


def test_one_that_loads_as_a_language_model_is_noted(place: Path, plan_of: Plans) -> None:
    write_model(place / "sees", **{**VISION, "model_type": "gemma3"})
    plan = plan_of(f"{MODEL}=sees")
    assert plan.problems == ()
    assert any("gemma3" in note and "on text alone" in note for note in plan.notes)


def test_every_family_that_sees_is_run_on_images_or_text_alone_or_refused_by_name(
    place: Path, problems_of: Problems
) -> None:
    """Whatever transformers has as a model of images and text: none is taken for one that it isn't."""
    families = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - IMAGE_FAMILIES - AS_TEXT
    assert {"idefics3", "smolvlm", "llava", "internvl", "mistral3"} <= families and len(families) > 40
    for family in sorted(families):
        write_model(place / "sees", **{**VISION, "model_type": family})
        found = [
            problem for problem in problems_of(f"{MODEL}=sees", "data.image_key=image") if family in problem.reason
        ]
        assert any(problem.key == MODEL for problem in found), family
        assert any(problem.key == "data.image_key" and "qwen3_5" in problem.remedy for problem in found), family


def test_those_are_the_ones_that_transformers_has_as_language_models() -> None:
    for family in AS_TEXT:
        assert family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        assert {"vision_config", "audio_config"} & set(CONFIG_MAPPING[family].sub_configs)


@pytest.mark.parametrize("column", ["images", "image", "video", "audios"])
def test_a_column_of_images_is_refused_in_each_kind_of_run(
    place: Path, problems_of: Problems, sft_plan_of: SftPlans, column: str
) -> None:
    row = {"prompt": "1+1=", "answer": "2", "chosen": "2", "rejected": "3", column: ["a.png"]}
    (place / "seen.jsonl").write_text(10 * (json.dumps(row) + "\n"))
    for words in ([], [PREFERENCES]):
        problem = unseen(problems_of("data.train_files=[seen.jsonl]", *words))
        assert problem.key == "data.train_files[0]" and column in problem.reason and problem.remedy
    problem = unseen(problems_of("data.val_files=[seen.jsonl]"))
    assert problem.key == "data.val_files[0]"
    problem = unseen(sft_plan_of("data.train_files=[seen.jsonl]").problems)
    assert problem.key == "data.train_files[0]"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(next(iter(part.values()))))
def test_a_part_of_a_message_that_is_no_text_is_refused(
    place: Path, problems_of: Problems, sft_plan_of: SftPlans, part: dict[str, Any]
) -> None:
    row = {"prompt": asked(part), "answer": "2", "talk": [*asked(part), {"role": "assistant", "content": "2"}]}
    (place / "seen.jsonl").write_text(10 * (json.dumps(row) + "\n"))
    problem = unseen(problems_of("data.train_files=[seen.jsonl]"))
    assert problem.key == "data.train_files[0]" and "the column prompt" in problem.reason
    problem = unseen(sft_plan_of("data.train_files=[seen.jsonl]", "data.messages_key=talk").problems)
    assert problem.key == "data.train_files[0]" and "messages with a part" in problem.reason
    with pytest.raises(DataError, match=r"message 1 \(user\) has a part of the type"):
        checked_messages(row["prompt"])


def test_text_and_empty_columns_are_no_images(place: Path, problems_of: Problems) -> None:
    row = {"prompt": asked(), "answer": "2", "images": [], "image": None}
    (place / "seen.jsonl").write_text(10 * (json.dumps(row) + "\n"))
    assert problems_of("data.train_files=[seen.jsonl]") == []
    assert checked_messages(asked()) == asked()


def test_images_in_a_later_row_are_refused_whatever_becomes_of_bad_rows(
    place: Path, problems_of: Problems, sft_plan_of: SftPlans
) -> None:
    row = {"prompt": "1+1=", "answer": "2"}
    (place / "seen.jsonl").write_text(3 * (json.dumps(row) + "\n") + json.dumps({**row, "images": [{"bytes": "x"}]}))
    for way in ("error", "drop"):
        words = ["data.train_files=[seen.jsonl]", f"data.on_bad_row={way}"]
        assert unseen(problems_of(*words)).key == "data.train_files[0]"
        assert unseen(sft_plan_of(*words).problems).key == "data.train_files[0]"
