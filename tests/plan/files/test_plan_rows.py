"""Steps are counted after what is held out, in the plan as in the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import ConfigError, Problem
from tandem.plan.plan import Plan
from tandem.plan.sft import SftPlan
from tests.e2e.conftest import task
from tests.e2e.seven import prepare, write_rows

__all__ = ["task"]

WARMUP = "actor_rollout_ref.actor.optim.warmup_steps"
EPOCH = ("trainer.total_steps=null", "trainer.total_epochs=1", "evaluation.interval=1")


def held_out(place: Path, count: int) -> str:
    """The word that holds the first ``count`` training rows out."""
    rows = [{"prompt": f"{x}+1=", "answer": str(x + 1)} for x in range(count)]
    return f"data.val_files=[{write_rows(place / 'held.jsonl', rows)}]"


def test_rows_that_are_held_out_make_no_steps(place: Path, plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(*EPOCH, held_out(place, 16))
    assert plan.batch.steps == 3  # 24 of 40 rows, 8 a step
    assert any(note.startswith("16 rows of data.train_files are held out too") for note in plan.notes)
    assert plan_of(*EPOCH, held_out(place, 16), "data.drop_val_prompts=false").batch.steps == 5


def test_the_same_prompt_in_a_template_and_in_messages(place: Path, plan_of: Callable[..., Plan]) -> None:
    assert plan_of(*EPOCH, held_out(place, 16), "data.template='Add: {prompt}'").batch.steps == 3
    talk = [[{"role": "user", "content": f"{x}+1="}] for x in range(40)]
    train = write_rows(place / "talk.jsonl", [{"prompt": messages, "answer": "1"} for messages in talk])
    val = write_rows(place / "talk_val.jsonl", [{"prompt": messages, "answer": "2"} for messages in talk[:8]])
    assert plan_of(*EPOCH, f"data.train_files=[{train}]", f"data.val_files=[{val}]").batch.steps == 4


@pytest.mark.parametrize(("warmup", "refused"), [(2, False), (3, True), (4, True)])
def test_a_warm_up_is_held_against_the_steps_that_are_left(
    place: Path, problems_of: Callable[..., list[Problem]], warmup: int, refused: bool
) -> None:
    problems = problems_of(*EPOCH, held_out(place, 16), f"{WARMUP}={warmup}")
    assert [problem.key for problem in problems] == ([WARMUP] if refused else [])
    assert all("the run has 3 optimizer steps" in problem.reason for problem in problems)


def test_a_run_of_which_all_is_held_out_has_no_step(place: Path, problems_of: Callable[..., list[Problem]]) -> None:
    (problem,) = problems_of(*EPOCH, held_out(place, 40))
    assert problem.key == "data.train_batch_size" and "40 more are held out" in problem.reason
    assert "data.drop_val_prompts" in problem.remedy


def test_files_that_are_too_large_to_compare_say_that_it_may_be_fewer(
    place: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.plan.files.rows._READ_BYTES", 10)
    plan = plan_of(*EPOCH, held_out(place, 16))
    assert plan.batch.steps == 5 and any("make the steps fewer" in note for note in plan.notes)


def test_what_only_a_tokenizer_tells_is_held_against_the_schedule_before_the_model_is_loaded(
    task: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{d}>" if d < 4 else f"{d}{d}{d}>", "answer": str(d)} for d in range(8)]
    words = (
        task, f"data.train_files=[{write_rows(tmp_path / 'rows.jsonl', rows)}]", "data.on_overlong_prompt=drop",
        "data.train_batch_size=2", *EPOCH[:2], f"trainer.output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    prepare(*words, f"{WARMUP}=1").rewards.close()
    with pytest.raises(ConfigError, match=f"{WARMUP} = 3: the run has 2 optimizer steps"):
        prepare(*words, f"{WARMUP}=3")


def test_a_batch_of_more_than_all_prompts_is_told_and_refused_where_it_makes_no_step(
    plan_of: Callable[..., Plan], sft_plan_of: Callable[..., SftPlan]
) -> None:
    for batch, told in ((40, False), (48, True)):
        for plan in (plan_of, sft_plan_of):
            words = (f"data.train_batch_size={batch}", "trainer.total_steps=3", "trainer.total_epochs=null")
            found = plan(*words)
            assert found.problems == ()
            assert any(f"= {batch} is more than the 40" in note for note in found.notes) == told
            refused = plan(f"data.train_batch_size={batch}", "trainer.total_epochs=1", "trainer.total_steps=null")
            assert [p.key for p in refused.problems] == (["data.train_batch_size"] if told else [])
