"""A store with less room than staleness admits slows a run down and never stops it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.control.entry import LOOPS
from tests.modes.gates import streaming


@pytest.mark.parametrize("mode", ["hybrid", "fully_async"])
@pytest.mark.parametrize("capacity", [4, 5])
def test_an_engine_ahead_never_keeps_the_place_of_a_group_that_is_waited_for(
    task: Path, tmp_path: Path, mode: str, capacity: int
) -> None:
    execution = f"{{mode: {mode}, max_staleness: 3, deadline_s: 60, data_plane: {{capacity_groups: {capacity}}}}}"
    words = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "trainer.total_steps=4")
    session = streaming(task, f"trainer.output_dir={tmp_path}", f"execution={execution}", *words)
    with session.run.running():
        LOOPS[mode](session)
    assert session.run.progress.step == 4
    accounts = session.plane.status().accounts
    accounts.check()
    assert accounts.trained == 4 * 4 * 2 and not accounts.dropped
