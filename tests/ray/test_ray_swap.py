"""On Ray too another engine takes over between two steps, and the run is the one without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.columns.proto import DataProto
from tandem.control.entry import LOOPS
from tandem.session.rollout import Workers
from tests.e2e.conftest import task
from tests.e2e.seven import Run, equal, prepare, train

__all__ = ["task"]

WORDS = (
    "execution={mode: hybrid, max_staleness: 0}",
    "plugins=[tests.modes.own_engines]",
    "trainer.total_steps=3",
    "trainer.exact=true",
    "trainer.rollouts_per_step=4",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.name=test_apart",
)
ON_RAY = ("runtime.name=ray", "runtime.threads=false", "actor_rollout_ref.rollout.swap={step: 2, name: test_too}")


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_an_equal_engine_that_takes_over_on_ray_changes_nothing(task: Path, tmp_path: Path) -> None:
    plain = train(task, f"trainer.output_dir={tmp_path / 'here'}", "runtime.threads=true", *WORDS)
    session = prepare(task, f"trainer.output_dir={tmp_path / 'ray'}", *ON_RAY, *WORDS)
    assert isinstance(session.rollout, Workers)
    rollout, end_step, pids = session.rollout, session.run.end_step, list[int]()

    def ended(step: int, batch: DataProto, update: dict[str, float]) -> None:
        pids.append(rollout.alive[0].engine.pid)  # type: ignore[attr-defined]
        end_step(step, batch, update)

    object.__setattr__(session.run, "end_step", ended)
    swapped = Run(session, session.run.output_dir)
    with session.run.running():
        LOOPS["hybrid"](session)
        weights = swapped.weights
    assert pids[0] == pids[1] != pids[2]
    assert swapped.prompts == plain.prompts
    assert swapped.rewards == plain.rewards
    assert equal(weights, plain.weights)
