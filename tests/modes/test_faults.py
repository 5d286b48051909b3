"""What must not happen to weights and processes while generation goes on beside training."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import EngineDiedError
from tandem.control.entry import LOOPS
from tandem.models.fingerprint import fingerprint
from tandem.rollout.connection import Patience
from tandem.rollout.process import ProcessEngine
from tandem.stages.facts import REF
from tests.e2e.seven import training_rank
from tests.modes.gates import EventLog, SlowEngine, streaming, with_engine


def test_b37_the_first_weights_after_a_resume_are_the_actors_and_not_the_references(task: Path, tmp_path: Path) -> None:
    words = (
        task,
        f"trainer.output_dir={tmp_path}",
        "execution={mode: hybrid, max_staleness: 1, num_iters_per_train_update: 2}",
        "algorithm.kl={in: loss, coef: 0.05}",
        "data.train_batch_size=4",
        "trainer.save_interval=2",
    )
    sent = []
    for more in (("trainer.total_steps=2",), ("trainer.total_steps=4", "trainer.resume=auto")):
        session, engine = streaming(*words, *more), SlowEngine(EventLog())
        with_engine(session, engine)
        with session.run.running():
            LOOPS["hybrid"](session)
        sent.append(engine.loaded)
    reference = fingerprint(training_rank(session).weights.state_dict()[REF].items())
    first, resumed = sent
    assert sorted(resumed) == [2, 3, 4]
    assert resumed[2] == first[2]
    assert len({first[0], first[2], resumed[4]}) == 3
    assert reference == first[0] != resumed[2]


@pytest.mark.parametrize(
    ("mode", "restarts", "how"),
    [("hybrid", 1, signal.SIGKILL), ("hybrid", 1, signal.SIGSTOP), ("fully_async", 0, signal.SIGKILL)],
)
def test_b83_an_engine_that_dies_or_hangs_is_started_again_or_ends_the_run_with_its_name(
    task: Path, tmp_path: Path, mode: str, restarts: int, how: signal.Signals
) -> None:
    """Its tickets are given again: no sample is lost or trained twice."""
    execution = f"{{mode: {mode}, max_staleness: 1, deadline_s: 60, max_engine_restarts: {restarts}}}"
    words = ("data.train_batch_size=4", "trainer.total_steps=6", "runtime.threads=false")
    session = streaming(task, f"trainer.output_dir={tmp_path}", f"execution={execution}", *words)
    engine = session.rollout.alive[0].engine
    assert isinstance(engine, ProcessEngine)
    engine._link._patience = Patience(start_s=60, deadline_s=60, silence_s=3)

    def end_step(step: int, batch: Any, update: Any) -> None:
        type(session.run).end_step(session.run, step, batch, update)
        if step == 1:
            os.kill(engine.pid, how)

    object.__setattr__(session.run, "end_step", end_step)
    if restarts:
        with session.run.running():
            LOOPS[mode](session)
        accounts = session.plane.status().accounts
        accounts.check()
        assert (accounts.trained, accounts.queued, accounts.dropped) == (6 * 4 * 8, 0, {})
        return
    with pytest.raises(EngineDiedError, match=r"'rollout-0' .* was killed by SIGKILL"), session.run.running():
        LOOPS[mode](session)
    assert 2 <= session.run.progress.step <= 4
    assert "EngineDiedError" in (tmp_path / "report.html").read_text()
