"""Another engine that takes over between two steps of a run: no ticket is lost, and it serves once it is proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.base.errors import TandemError
from tests.e2e.seven import Run, equal, train

SWAP = "actor_rollout_ref.rollout.swap"
NAME = "actor_rollout_ref.rollout.name"
USUAL = (
    *("trainer.total_steps=3", "trainer.exact=true", "trainer.rollouts_per_step=4", "runtime.threads=true"),
    "data.train_batch_size=4",
)
PLUGIN = "plugins=[tests.modes.own_engines]"
STRICT = {
    "colocate": "execution={mode: colocate}",
    "hybrid": "execution={mode: hybrid, max_staleness: 0}",
    "fully_async": "execution={mode: fully_async, max_staleness: 0}",
}


def engine_of(run: Run) -> str:
    """What generated last."""
    (worker,) = run.session.rollout.alive
    return type(worker.engine).__name__


@pytest.mark.parametrize("mode", STRICT)
def test_at_staleness_0_a_run_with_an_equal_engine_from_some_step_on_is_the_run_without(
    task: Path, tmp_path: Path, mode: str
) -> None:
    words = (STRICT[mode], PLUGIN, *USUAL, f"{NAME}=test_apart")
    plain = train(task, f"trainer.output_dir={tmp_path / 'plain'}", *words)
    swapped = train(task, f"trainer.output_dir={tmp_path / 'swapped'}", *words, f"{SWAP}={{step: 2, name: test_too}}")
    assert (engine_of(plain), engine_of(swapped)) == ("Apart", "ApartToo")
    assert swapped.prompts == plain.prompts
    assert [row["reward/mean"] for row in swapped.rows] == [row["reward/mean"] for row in plain.rows]
    assert [row["lag/max"] for row in swapped.rows] == [0, 0, 0]
    assert equal(swapped.weights, plain.weights)


def test_with_stale_samples_every_group_is_trained_once(task: Path, tmp_path: Path) -> None:
    mode = "execution={mode: hybrid, max_staleness: 2, weight_sync: {overlap: true}}"
    swap = f"{SWAP}={{step: 1, name: test_too}}"
    run = train(task, f"trainer.output_dir={tmp_path}", mode, PLUGIN, "trainer.total_steps=4", swap)
    assert len(run.rows) == 4 and all(row["optim/applied"] > 0 for row in run.rows)
    assert all(0 <= row["lag/max"] <= 2 for row in run.rows)
    assert not [key for row in run.rows for key in row if key.startswith("dropped/") and row[key]]


@pytest.mark.parametrize("name", ["test_silent", "test_deaf"])
def test_an_engine_that_does_not_have_the_weights_ends_the_run_before_it_serves(
    task: Path, tmp_path: Path, name: str
) -> None:
    words = ("execution={mode: hybrid, max_staleness: 0}", PLUGIN, *USUAL, f"{SWAP}={{step: 2, name: {name}}}")
    with pytest.raises(TandemError, match=r"rollout-0 (answered no fingerprint|does not generate with)"):
        train(task, f"trainer.output_dir={tmp_path}", *words)
