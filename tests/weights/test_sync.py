"""Pushing weights: in order, one at a time, compared, timed; whoever blocks or errs is named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError, DeadlineError, EngineDiedError, TandemError
from tandem.models.fingerprint import fingerprint
from tandem.weights.store import WeightStore
from tandem.weights.sync import LEFT_OUT, HealthChecked, Receiver, SharedSnapshots, WeightSync

PATIENCE_S = 20.0


class FakeEngine:
    """Copies what it is sent, once ``go`` lets it."""

    def __init__(self, *, open_: bool = True) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.version = -1
        self.loads: list[int] = []
        self.applied_s = 0.0
        self.go, self.begun = threading.Event(), threading.Event()
        if open_:
            self.go.set()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.version = version
        self.loads.append(version)
        return fingerprint(self.weights.items())

    def ping(self, deadline_s: float) -> int:
        return self.version


class Forgetful(FakeEngine):
    """Goes on with what it had, and answers truly."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in weights}
        self.version = version
        return fingerprint(self.weights.items())


class Dead(FakeEngine):
    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
        raise EngineDiedError("rollout-1 was killed by SIGKILL")


class Follower:
    """Takes every other version and can't be asked for its health."""

    def __init__(self) -> None:
        self.loads: list[int] = []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
        self.loads.append(version)
        return LEFT_OUT if version % 2 else fingerprint(weights)


class Trainer:
    """Weights that a store guards, and their export."""

    def __init__(self) -> None:
        self.live = {"a": torch.randn(5, 3), "b": torch.randn(4)}
        self.store = WeightStore(self.live)
        self.store.save("ref")
        self.acknowledged: list[tuple[str, int]] = []

    def train(self) -> None:
        for tensor in self.live.values():
            tensor.add_(1.0)

    def sync(self, receivers: dict[str, Receiver], **options: object) -> WeightSync:
        return WeightSync(
            SharedSnapshots(lambda: self.live.items()),
            receivers,
            require_actor=self.store.require_actor,
            acknowledged=lambda name, version: self.acknowledged.append((name, version)),
            **options,  # type: ignore[arg-type]
        )

    def fingerprint(self) -> str:
        return fingerprint(self.live.items())


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def soon(ready: Callable[[], bool]) -> bool:
    event = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if ready():
            return True
        event.wait(0.01)
    return False


@given(receivers=st.integers(1, 3), overlap=st.booleans(), pushes=st.integers(1, 4), first=st.integers(0, 7))
def test_every_receiver_gets_every_version_in_order(receivers: int, overlap: bool, pushes: int, first: int) -> None:
    trainer = Trainer()
    engines = {f"rollout-{i}": FakeEngine() for i in range(receivers)}
    sync = trainer.sync(dict(engines), overlap=overlap)
    for version in range(first, first + pushes):
        trainer.train()
        phases = sync.push(version)
        assert {"wait", "health", "snapshot"} <= set(phases)
        assert all(seconds >= 0 for seconds in phases.values())
    sync.wait()
    for name, engine in engines.items():
        assert engine.loads == list(range(first, first + pushes))
        assert [v for n, v in trainer.acknowledged if n == name] == engine.loads
        assert fingerprint(engine.weights.items()) == trainer.fingerprint()
    sync.close()


def test_b37_other_weights_than_the_actors_are_not_published(trainer: Trainer) -> None:
    engine = FakeEngine()
    sync = trainer.sync({"rollout-0": engine})
    with trainer.store.using("ref"), pytest.raises(ContractError, match=r"publish weights.*'ref' is in place"):
        sync.push(0)
    assert engine.loads == []
    sync.push(0)
    assert fingerprint(engine.weights.items()) == trainer.fingerprint()


@pytest.mark.parametrize("overlap", [False, True])
def test_b51_the_trainer_may_go_on_as_soon_as_push_returns(trainer: Trainer, overlap: bool) -> None:
    engine = FakeEngine(open_=not overlap)
    sync = trainer.sync({"rollout-0": engine}, overlap=overlap)
    sent = trainer.fingerprint()
    sync.push(0)
    trainer.train()
    assert trainer.fingerprint() != sent
    engine.go.set()
    sync.wait()
    assert fingerprint(engine.weights.items()) == sent


def test_with_overlap_a_push_returns_before_it_is_acknowledged(trainer: Trainer) -> None:
    engine = FakeEngine(open_=False)
    sync = trainer.sync({"rollout-0": engine}, overlap=True)
    assert set(sync.push(0)) == {"wait", "health", "snapshot"}
    sync.check()
    assert trainer.acknowledged == []
    engine.go.set()
    sync.wait()
    assert trainer.acknowledged == [("rollout-0", 0)]
    assert set(sync.push(1)) == {"wait", "health", "snapshot", "transfer", "apply"}
    sync.close()


def test_what_a_receiver_finishes_first_is_a_phase_of_its_own(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tandem.weights.sync.time.perf_counter", lambda: now[0])

    class Busy(FakeEngine):
        def prepare(self, version: int) -> None:
            now[0] += 3.0

        def doing(self) -> str:
            return "finishes its groups first"

        def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
            now[0] += 2.0
            self.applied_s = 0.5
            return super().load(weights, version)

    sync = trainer.sync({"rollout-0": Busy()})
    assert sync.push(0) == {"wait": 0, "health": 0, "snapshot": 0, "drain": 3.0, "transfer": 1.5, "apply": 0.5}
    assert sync.arrived == {"drain": 3.0, "transfer": 1.5, "apply": 0.5}


def test_the_next_push_waits_for_the_one_under_way(trainer: Trainer) -> None:
    engine = FakeEngine(open_=False)
    sync = trainer.sync({"rollout-0": engine}, overlap=True)
    first = trainer.fingerprint()
    sync.push(0)
    trainer.train()
    second = threading.Thread(target=sync.push, args=(1,), daemon=True)
    second.start()
    assert engine.begun.wait(PATIENCE_S)
    assert second.is_alive() and engine.loads == []
    engine.go.set()
    second.join(PATIENCE_S)
    assert not second.is_alive()
    sync.wait()
    assert engine.loads == [0, 1]
    assert first != fingerprint(engine.weights.items()) == trainer.fingerprint()


def test_no_version_is_skipped_or_sent_twice(trainer: Trainer) -> None:
    sync = trainer.sync({"rollout-0": FakeEngine()})
    sync.push(4)
    for version in (4, 6, 3):
        with pytest.raises(ContractError, match=f"version {version} after 4"):
            sync.push(version)
    sync.push(5)
    assert sync.version == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_holds_other_weights_is_named_and_not_acknowledged(trainer: Trainer, overlap: bool) -> None:
    sync = trainer.sync({"rollout-0": FakeEngine(), "rollout-1": Forgetful()}, overlap=overlap)
    with pytest.raises(TandemError, match=r"rollout-1 answered fingerprint .* version 0.*does not generate"):
        sync.push(0)
        sync.wait()
    assert [name for name, _ in trainer.acknowledged] == ["rollout-0"]


@pytest.mark.parametrize("call", ["push", "wait", "check", "close"])
def test_b83_an_error_behind_the_back_is_raised_by_the_next_call(trainer: Trainer, call: str) -> None:
    sync = trainer.sync({"rollout-0": FakeEngine(), "rollout-1": Dead()}, overlap=True)
    sync.push(0)
    assert soon(lambda: trainer.acknowledged == [("rollout-0", 0)])

    def raised() -> bool:
        try:
            sync.check()
        except EngineDiedError:
            return True
        return False

    assert soon(raised)
    calls: dict[str, Callable[[], object]] = {
        "push": lambda: sync.push(1),
        "wait": sync.wait,
        "check": sync.check,
        "close": sync.close,
    }
    with pytest.raises(EngineDiedError, match="rollout-1 was killed"):
        calls[call]()
    sync.leave("rollout-1")
    sync.push(1)
    sync.wait()
    assert trainer.acknowledged == [("rollout-0", 0), ("rollout-0", 1)]


def test_whoever_is_late_is_named(trainer: Trainer) -> None:
    late = FakeEngine(open_=False)
    sync = trainer.sync({"rollout-0": FakeEngine(), "rollout-1": late}, overlap=True, deadline_s=0.2)
    sync.push(0)
    for call in (sync.wait, lambda: sync.push(1), sync.check):
        with pytest.raises(DeadlineError, match=r"0\.2 s for weights version 0; blocked by rollout-1$"):
            call()
    sync.leave("rollout-1")
    sync.push(1)
    late.go.set()


def test_what_a_receiver_must_end_first_is_not_the_time_of_the_push(trainer: Trainer) -> None:
    class Busy(FakeEngine):
        """Has something to finish before each load, and then takes its time."""

        def __init__(self) -> None:
            super().__init__(open_=False)
            self.finished = threading.Event()
            self.prepared: list[int] = []

        def prepare(self, version: int) -> None:
            assert self.finished.wait(PATIENCE_S)
            self.prepared.append(version)

        def doing(self) -> str:
            return "" if self.finished.is_set() else "finishes its groups first"

    busy = Busy()
    sync = trainer.sync({"rollout-0": busy}, overlap=True, deadline_s=0.2)
    sync.push(0)
    waiting = threading.Thread(target=sync.wait, daemon=True)
    waiting.start()
    assert soon(lambda: sync.blocked_by != "")
    assert sync.blocked_by == "waits for weights version 0; blocked by rollout-0, which finishes its groups first"
    threading.Event().wait(0.4)
    assert waiting.is_alive()
    sync.check()
    busy.finished.set()
    busy.go.set()
    waiting.join(PATIENCE_S)
    assert (busy.prepared, busy.loads, sync.blocked_by) == ([0], [0], "")
    busy.go.clear()
    sync.push(1)
    with pytest.raises(DeadlineError, match=r"0\.2 s for weights version 1; blocked by rollout-0$"):
        sync.wait()
    busy.go.set()


def test_a_health_call_that_nobody_answers_stops_the_push_before_the_snapshot(trainer: Trainer) -> None:
    class Deaf(FakeEngine):
        def ping(self, deadline_s: float) -> int:
            self.begun.set()
            self.go.wait(PATIENCE_S)
            return self.version

    deaf = Deaf(open_=False)
    sync = trainer.sync({"rollout-0": FakeEngine(), "rollout-1": deaf}, health_s=0.2)
    with pytest.raises(DeadlineError, match=r"0\.2 s for an answer to the health call .* blocked by rollout-1"):
        sync.push(0)
    assert trainer.acknowledged == [] and sync.version is None
    deaf.go.set()
    sync.push(0)


def test_b39_an_engine_that_fell_back_to_other_weights_is_found_before_the_next_push(trainer: Trainer) -> None:
    engine = FakeEngine()
    sync = trainer.sync({"rollout-0": engine})
    sync.push(0)
    sync.push(1)
    engine.version = 0  # as after a restart, or a wake that reloads
    with pytest.raises(TandemError, match="rollout-0 has weights version 0, it acknowledged 1"):
        sync.push(2)


def test_a_late_joiner_has_the_last_version_before_it_counts(trainer: Trainer) -> None:
    sync = trainer.sync({"rollout-0": FakeEngine()}, overlap=True)
    early, late = FakeEngine(), FakeEngine()
    sync.join("rollout-1", early)
    assert early.loads == []
    sync.push(0)
    sent = trainer.fingerprint()
    trainer.train()
    sync.join("rollout-2", late)
    assert late.loads == [0] and fingerprint(late.weights.items()) == sent
    assert ("rollout-2", 0) in trainer.acknowledged
    with pytest.raises(ContractError, match="leaves first"):
        sync.join("rollout-2", late)
    sync.push(1)
    sync.wait()
    assert late.loads == [0, 1] and early.loads == [0, 1]


def test_followers_get_every_version_too_and_may_leave_some_out(trainer: Trainer) -> None:
    replica, engine = Follower(), FakeEngine()
    assert isinstance(engine, HealthChecked) and not isinstance(replica, HealthChecked)
    sync = trainer.sync({"rollout-0": engine, "actor_fwd": replica})
    sync.push(0)
    sync.push(1)
    assert replica.loads == [0, 1]
    assert sorted(trainer.acknowledged) == [("actor_fwd", 0), ("actor_fwd", 1), ("rollout-0", 0), ("rollout-0", 1)]


def test_the_type_that_engines_hold_is_explicit(trainer: Trainer) -> None:
    engine = FakeEngine()
    snapshots = SharedSnapshots(lambda: trainer.live.items(), dtype=torch.bfloat16)
    sync = WeightSync(
        snapshots, {"rollout-0": engine}, require_actor=trainer.store.require_actor, acknowledged=lambda *_: None
    )
    sync.push(0)
    assert fingerprint(engine.weights.items()) == fingerprint((n, t.bfloat16()) for n, t in trainer.live.items())


def test_weights_that_are_gathered_one_by_one_are_never_there_all_at_once() -> None:
    alive = 0

    class Counted:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1
            assert alive <= 2

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(20):
            tensor = torch.full((100,), float(i))
            tensor.owner = Counted()  # type: ignore[attr-defined]
            yield f"w{i}", tensor
            del tensor

    snapshot = SharedSnapshots(export)()
    assert len(list(snapshot.weights)) == 20
