"""A run of episodes that was ended, in the middle of one too, goes on as if it hadn't been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control.colocate import train_colocate
from tandem.plan.plan import Plan, compile_plan
from tests.e2e.seven import Run, equal, prepare, train
from tests.e2e.test_resume import TIMES, Killed
from tests.episodes.conftest import EPISODE, MODES, PLAYS, TALK

EXACT = (  # else the engine's batches, and so their rounding, depend on the time
    *(*TALK, "trainer.exact=true", "data.train_batch_size=2", "data.max_response_length=24"),
    *("trainer.total_steps=2", "trainer.save_interval=1"),
)
EPISODE_CLOCKS = ("episode/seconds", "episode/tool_seconds", "episode/engine_seconds")
CLOCKS = (*TIMES, *EPISODE_CLOCKS, "rollout/work_s", "rollout/longest")


def lines(run: Run) -> list[dict[str, Any]]:
    """What a run reports, without how long it took."""
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in run.rows]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_from_a_checkpoint_bit_by_bit(task: Path, tmp_path: Path, mode: str) -> None:
    words = (task, *EXACT, *MODES[mode])
    whole = train(*words, f"trainer.output_dir={tmp_path / 'whole'}")
    saved = tmp_path / "whole" / "checkpoints" / "step_00000001"
    resumed = train(*words, f"trainer.output_dir={tmp_path / 'resumed'}", f"trainer.resume={saved}")
    assert lines(resumed) == lines(whole)[1:]
    assert equal(resumed.weights, whole.weights)
    assert resumed.session.run.progress.samples == whole.session.run.progress.samples


def test_a_run_that_was_killed_between_turns_goes_on_as_if_it_had_not_been(task: Path, tmp_path: Path) -> None:
    words = (task, *EXACT, "trainer.resume=auto")
    whole = train(*words, f"trainer.output_dir={tmp_path / 'whole'}")
    words = (*words, f"trainer.output_dir={tmp_path / 'killed'}")
    session = prepare(*words)
    engine: Any = session.composite.engine
    generate, started = engine.generate, 0

    def until_a_second_turn(*arguments: Any) -> Iterator[Any]:
        nonlocal started
        started += 1
        for output in generate(*arguments):
            yield output
            if started == 2 and len(output.request.prompt_ids) > 8:  # longer than any first one
                raise Killed

    engine.generate = until_a_second_turn
    with pytest.raises(Killed), session.run.running():
        train_colocate(session)
    assert session.run.progress.step == 1
    resumed = train(*words)
    assert lines(resumed) == lines(whole)
    assert equal(resumed.weights, whole.weights)


def test_another_episode_is_told_when_a_run_goes_on(task: Path, tmp_path: Path) -> None:
    words = (str(task), "trainer.total_steps=1", "trainer.save_interval=1", f"trainer.output_dir={tmp_path}")
    train(*words, *TALK)

    def plan_of(word: str) -> Plan:
        changed = (*words, "trainer.total_steps=2", "trainer.resume=latest", word)
        return compile_plan(load_words(changed, Config))

    def told(word: str) -> str:
        plan = plan_of(word)
        assert plan.problems == ()
        return " ".join(note for note in plan.notes if "has other values than the saved one" in note)

    assert EPISODE not in told(*TALK)
    assert f"{EPISODE}.turns 2 -> 3" in told(f"{EPISODE}={{type: talk, file: {PLAYS}, turns: 3}}")
    other = told(f"{EPISODE}={{type: tokens, file: {PLAYS}, turns: 2, max_turns: 4}}")
    assert f"{EPISODE}.type talk -> tokens" in other and f"{EPISODE}.max_turns 8 -> 4" in other
