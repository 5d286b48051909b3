"""Processes that die or hang: whoever waits hears of it within seconds, with the name, the way, and the last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ContractError, DeadlineError, EngineDiedError, EngineHungError, TandemError
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import GroupRequest, Sampling
from tandem.rollout.spec import EngineSpec
from tests.rollout.process_engines import order
from tests.rollout.tiny_models import llama, requests

pytestmark = pytest.mark.usefixtures("warm_python")

SAMPLING = Sampling(n=2, max_tokens=8, stop_token_ids=(0, 1))
LONG = Sampling(n=2, max_tokens=70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama(0).save_pretrained(path)
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[ProcessEngine]:
    spec = EngineSpec(
        model=str(folder), engine="test_faulty", plugins=("tests.rollout.process_engines",), max_num_seqs=4, threads=1
    )
    with ProcessEngine("rollout-0", spec, deadline_s=4.0, silence_s=4.0) as engine:
        yield engine


def ended_for(work: Callable[[], object], errors: list[BaseException]) -> threading.Thread:
    def caught() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    return thread


def gone(pid: int, seconds: float) -> bool:
    """Whether the process is no more, or only waits to be collected, within so many seconds."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_b83_every_waiting_call_hears_of_a_kill_and_so_does_every_later_one(engine: ProcessEngine) -> None:
    engine.wait_until_ready()
    errors: list[BaseException] = []
    paused = threading.Event()

    def generating() -> None:
        for _ in engine.generate(endless(), LONG):
            paused.set()

    threads = [ended_for(generating, errors)]
    assert paused.wait(30)
    engine.pause()
    silent = requests(1)
    threads.append(ended_for(lambda: list(engine.generate(silent, LONG)), errors))
    time.sleep(0.3)
    os.kill(engine.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(errors) == 2
    later: list[Callable[[], Any]] = [
        engine.resume,
        engine.sleep,
        engine.check,
        lambda: engine.ping(5.0),
        lambda: engine.load(llama(0).named_parameters(), 1),
        lambda: engine.generate(silent, LONG),
    ]
    for call in later:
        with pytest.raises(EngineDiedError) as caught:
            call()
        errors.append(caught.value)
    for error in errors:
        assert isinstance(error, EngineDiedError)
        assert f"'rollout-0' (process {engine.pid}) was killed by SIGKILL" in str(error)


def endless() -> Iterator[GroupRequest]:
    for seed in range(10_000):
        yield GroupRequest(seed, requests(1, seed=seed)[0].prompt_ids, (seed, -seed - 1))


def test_b83_an_exception_inside_is_an_error_here_with_its_last_words(engine: ProcessEngine) -> None:
    with pytest.raises(ContractError, match="order 33 is refused"):
        list(engine.generate([order(33)], SAMPLING))
    assert len(list(engine.generate(requests(2), SAMPLING))) == 2
    with pytest.raises(EngineDiedError, match=r"(?s)exited with status 1.*ValueError: a defect inside the engine"):
        list(engine.generate([requests(1)[0], order(30)], SAMPLING))
    engine.close()
    engine.close()
    with pytest.raises(TandemError):
        engine.ping(1.0)


def test_an_engine_that_makes_no_token_is_ended_and_named(engine: ProcessEngine) -> None:
    outputs = engine.generate([requests(1)[0], order(32)], LONG)
    with pytest.raises(DeadlineError, match=r"'rollout-0' \(process \d+\) made no token for 4 s while 2 groups, 0 "):
        list(outputs)
    assert gone(engine.pid, 5)
    with pytest.raises(DeadlineError, match="made no token"):
        engine.check()


def test_a_process_that_is_stopped_is_named_within_its_deadline(engine: ProcessEngine) -> None:
    engine.wait_until_ready()
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineHungError, match=r"'rollout-0' .*gave no sign of life for 4 s"):
        engine.ping(20.0)
    with pytest.raises(EngineDiedError, match="Awaited was nothing in particular"):  # others may take its place
        engine.check()
    assert gone(engine.pid, 5)


OWNER = """
import sys, time
from tandem.rollout.process import ProcessEngine
from tandem.rollout.spec import EngineSpec
engine = ProcessEngine("orphan", EngineSpec(model=sys.argv[1], threads=1))
engine.wait_until_ready()
print(engine.pid, flush=True)
time.sleep(1000)
"""


def test_b85_no_process_outlives_its_owner(folder: Path) -> None:
    script = folder / "owner.py"
    script.write_text(OWNER)  # a script without a guard: a child that ran it again would start another child
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    assert gone(pid, 10)
