"""Streaming and overlap are real: what must go on at the same time does, shown by the order of events.

Engines wait for the event that must come first: a run in which it doesn't come ends with an error that says so.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.control.entry import LOOPS
from tandem.dataflow.tickets import Request, Ticket
from tandem.rollout.hf import HfEngine
from tandem.train.engine import FsdpEngine
from tests.e2e.seven import equal, training_engine
from tests.modes.gates import EventLog, SlowEngine, Streaming, observe, streaming, with_engine
from tests.modes.peak_memory import PeakBytes

STEPS = 3
LAST = 3
"""The place whose group comes last."""

WORDS = (
    "data.train_batch_size=4",
    f"trainer.total_steps={STEPS}",
    "algorithm.kl={in: loss, coef: 0.05}",
    "actor_rollout_ref.rollout.on_weight_update=keep",
)


def hybrid(task: Path, folder: Path, *words: str, **execution: object) -> Streaming:
    execution = {"mode": "hybrid", "max_staleness": 0, "num_iters_per_train_update": 4, "deadline_s": 30} | execution
    return streaming(task, f"trainer.output_dir={folder}", f"execution={json.dumps(execution)}", *WORDS, *words)


def run(session: Streaming) -> None:
    with session.run.running():
        LOOPS[session.plan.loop](session)


def test_the_first_forward_starts_before_the_last_group_is_finished(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, session = EventLog(), hybrid(task, tmp_path)
    with_engine(session, SlowEngine(log, may_end=lambda t: t.place != LAST or log.happened(f"forward {t.partition}")))
    observe(session, log, monkeypatch)
    run(session)
    for k in range(STEPS):
        assert log.before(f"forward {k}", f"group {k}.{LAST}")
        assert log.before(f"group {k}.{LAST}", f"backward {k}")  # one train call, on the merged partition
        assert log.events.count(f"forward {k}") == 4


def test_accumulated_training_starts_before_the_partition_is_sealed(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, session = EventLog(), hybrid(task, tmp_path, train_pipelining="accumulate")
    with_engine(session, SlowEngine(log, may_end=lambda t: t.place != LAST or log.happened(f"backward {t.partition}")))
    observe(session, log, monkeypatch)
    run(session)
    for k in range(STEPS):
        assert log.before(f"backward {k}", f"group {k}.{LAST}")
        assert log.before(f"backward {k}", f"seal {k}")
        assert log.events.count(f"backward {k}") == 4


def test_an_overlapped_push_is_acknowledged_after_the_next_step_has_begun(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog()
    session = hybrid(task, tmp_path, max_staleness=1, weight_sync={"overlap": True})
    with_engine(session, SlowEngine(log, may_load=lambda v: v in (0, STEPS) or log.happened(f"forward {v}")))
    batches = observe(session, log, monkeypatch)
    run(session)
    for version in range(1, STEPS):
        assert log.before(f"forward {version}", f"acknowledged {version}")
    assert [int(batch.ragged("token_versions").values.min()) for batch in batches] == [0, 0, 1]


def test_roles_of_their_own_start_before_the_last_group_too(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fully async: reference and actor_fwd score groups while others of the partition are generated."""
    log = EventLog()
    forward = FsdpEngine.forward

    def noted(self: FsdpEngine, *args: Any, **options: Any) -> Any:
        log.note(f"{threading.current_thread().name} scores")
        return forward(self, *args, **options)

    monkeypatch.setattr(FsdpEngine, "forward", noted)
    execution = "{mode: fully_async, max_staleness: 0, num_iters_per_train_update: 4, deadline_s: 30}"
    words = (*WORDS, f"execution={execution}", "algorithm.old_logprobs=recompute")
    session = streaming(task, f"trainer.output_dir={tmp_path}", *words)
    roles = ("reference scores", "actor_fwd scores")
    with_engine(session, SlowEngine(log, may_end=lambda t: t.place != LAST or all(map(log.happened, roles))))
    run(session)
    assert all(log.before(role, f"group 0.{LAST}") for role in roles)
    assert log.events.count("reference scores") == log.events.count("actor_fwd scores") == 4 * STEPS


def test_b48_with_no_staleness_and_slow_publications_the_run_ends(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each publication takes until the actor waits for the samples that wait for it."""
    log, session = EventLog(), hybrid(task, tmp_path, weight_sync={"overlap": True})
    with_engine(session, SlowEngine(log, may_load=lambda v: v in (0, STEPS) or log.happened(f"asked for {v}")))
    batches = observe(session, log, monkeypatch)
    take = session.plane.take

    def asked(request: Request, *args: Any, **options: Any) -> Any:
        log.note(f"asked for {request.partition}")
        return take(request, *args, **options)

    monkeypatch.setattr(session.plane, "take", asked)
    run(session)
    for k in range(1, STEPS):
        assert log.before(f"asked for {k}", f"acknowledged {k}")
        assert log.before(f"acknowledged {k}", f"group {k}.0")
    assert [set(batch.ragged("token_versions").values.tolist()) for batch in batches] == [{0}, {1}, {2}]


def stop_generation_within_partition_1(session: Streaming, log: EventLog, until: Callable[[], bool]) -> None:
    """Once its samples have some of their tokens and not all, the engine waits for ``until``."""
    stream: Any = session.rollout.alive[0]
    boundary: Any = real_engine(session)._boundary
    begin, token = stream._begin, boundary.token
    begun: list[int] = []  # tokens made when each group of the partition was begun

    def beginning(ticket: Ticket, *args: Any) -> Any:
        if ticket.partition == 1:
            begun.append(boundary.steps)
        return begin(ticket, *args)

    def slow(aborts: int) -> Any:
        if begun and boundary.steps > begun[-1]:
            log.wait_for(until, "what lets generation go on")
        return token(aborts)

    stream._begin, boundary.token = beginning, slow


def new_weights_at(engine: HfEngine) -> Callable[[], bool]:
    """Whether version 1 is there, or has ended what is in flight to get there."""
    return lambda: engine.version == 1 or engine._boundary.aborts > 1  # the first abort was for version 0


def real_engine(session: Streaming) -> HfEngine:
    engine = session.rollout.alive[0].engine
    assert isinstance(engine, HfEngine)
    return engine


ONE_PARTITION_AT_A_TIME = ("actor_rollout_ref.rollout.max_num_seqs=32", "actor_rollout_ref.rollout.ignore_eos=true")


@pytest.mark.parametrize(
    ("update", "partial", "mixed"),
    [("keep", "resume", True), ("abort", "resume", True), ("abort", "discard", False), ("wait", "resume", False)],
)
def test_b52_versions_in_a_sample_that_is_generated_while_weights_arrive(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str, partial: str, mixed: bool
) -> None:
    """Under ``keep`` tokens of one sample carry two versions; with ``discard`` or ``wait`` every sample has one."""
    rollout = (f"actor_rollout_ref.rollout.{word}" for word in (f"on_weight_update={update}", f"partial={partial}"))
    log, session = EventLog(), hybrid(task, tmp_path, *ONE_PARTITION_AT_A_TIME, *rollout, max_staleness=1)
    batches = observe(session, log, monkeypatch)
    if update != "wait":  # there they would wait for what waits for them
        stop_generation_within_partition_1(session, log, new_weights_at(real_engine(session)))
    run(session)
    per_sample = [[set(row.tolist()) for row in batch.ragged("token_versions")] for batch in batches]
    assert any({0, 1} == versions for versions in per_sample[1]) == mixed
    assert all(len(versions) == 1 for step in per_sample for versions in step) == (not mixed)
    assert all(min(versions) >= k - 1 for k, step in enumerate(per_sample) for versions in step)


def test_the_trace_shows_generation_above_training(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is at work on partition 1 when the first backward begins: the spans of both cover that moment."""
    words = (*ONE_PARTITION_AT_A_TIME, "trainer.trace=true")
    log, session = EventLog(), hybrid(task, tmp_path, *words, max_staleness=1)
    observe(session, log, monkeypatch)
    stop_generation_within_partition_1(session, log, lambda: log.happened("backward 0"))
    run(session)
    events = json.loads((tmp_path / "trace.json").read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [(lanes[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    train = next(span for span in spans if span[1] == "train")
    (generate,) = (span for span in spans if span[1] == "generate train_1")
    assert (train[0], generate[0]) == (threading.main_thread().name, "rollout-0, 1")
    assert generate[2] < train[2] < generate[3]
    pushes = [(lane, name) for lane, name, *_ in spans if name.startswith("push")]
    assert pushes == [("weights to rollout-0", f"push {version}") for version in range(STEPS + 1)]
    for lane in set(lanes.values()) - {threading.main_thread().name}:
        ends = sorted((begun, ended) for name, _, begun, ended in spans if name == lane)
        assert all(one[1] <= other[0] for one, other in pairwise(ends)), lane


def test_overlap_changes_no_step_given_its_samples(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that depend on their seeds alone: only their lag may differ, inside the bound, and not the weights."""
    log = EventLog()
    slow = SlowEngine(log, may_load=lambda v: v in (0, STEPS) or log.happened(f"forward {v}"))
    found = []
    for engine in (SlowEngine(EventLog()), slow):
        overlap = {"overlap": engine is slow}
        session = hybrid(task, tmp_path / str(engine is slow), max_staleness=1, weight_sync=overlap)
        with_engine(session, engine)
        batches = observe(session, log, monkeypatch)
        run(session)
        found.append((dict(session.composite.actor.export()), [batch.ragged("responses").values for batch in batches]))
        log.events.clear()
    (blocking, one), (overlapped, other) = found
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert equal(blocking, overlapped)


@pytest.mark.parametrize("pipelining", ["off", "accumulate"])
def test_peak_memory_of_a_forward_falls_with_the_sub_batches(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipelining: str
) -> None:
    peaks = []
    for count in (1, 2, 4):
        session = hybrid(
            task,
            tmp_path / str(count),
            "data.train_batch_size=16",
            "trainer.total_steps=1",
            num_iters_per_train_update=count,
            train_pipelining=pipelining,
        )
        trainer: Any = training_engine(session)
        forward, measured = trainer.forward, PeakBytes()

        def watched(*args: Any, forward: Any = forward, measured: PeakBytes = measured) -> Any:
            with measured:
                return forward(*args)

        monkeypatch.setattr(trainer, "forward", watched)
        with_engine(session, SlowEngine(EventLog()))
        run(session)
        peaks.append(measured.peak)
    assert peaks[1] < 0.6 * peaks[0] and peaks[2] < 0.6 * peaks[1]


def test_peak_bytes_are_those_of_what_lives_at_once() -> None:
    with PeakBytes() as measured:
        for _ in range(5):
            torch.zeros(1000).add(1.0)  # two of 4,000 bytes, which die
        kept = torch.zeros(500)
    assert measured.peak == 8000
    assert kept.view(5, 100).shape == (5, 100)


def test_a_ticket_is_read_from_its_request() -> None:
    assert str(Ticket(2, 5, 1)) == "ticket 5 of partition 2 (attempt 1)"  # what gates.ticket_of relies on
