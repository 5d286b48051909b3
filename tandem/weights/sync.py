"""The actor's weights on their way to everyone who generates or scores with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from tandem.base.errors import ContractError, DeadlineError, TandemError
from tandem.models.fingerprint import fingerprint, joined
from tandem.models.shared_weights import SharedWeights
from tandem.weights.probe import Expected, Probe, Probed
from tandem.weights.transfer import Transfer

Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]
"""(name, full tensor) pairs: all weights under Hugging Face names, tied ones under every name that they have, adapters
merged; or adapters alone, for receivers that have the base weights and compute adapters beside them."""


LEFT_OUT = "left out"
"""What a receiver answers to a version that it is not meant to take, such as a reference between two refreshes."""


class Receiver(Protocol):
    """Whoever takes weights over: a rollout engine, a model for forwards. ``UpdatedWorker`` is the first,
    ``ForwardModel`` the second.
    """

    def load(self, weights: Weights, version: int) -> str | None:
        """Take over ``weights`` as ``version``; the fingerprint of what is there now, or ``LEFT_OUT``.

        None, of one that can't tell what it has, is refused: silence is no proof.
        """


@runtime_checkable
class HealthChecked(Protocol):
    """A receiver that can be asked whether it is well. ``UpdatedWorker`` asks its engine."""

    def ping(self, deadline_s: float) -> int:
        """Return the version that it has; ``DeadlineError`` where it doesn't answer in time."""

    @property
    def applied_s(self) -> float:
        """Seconds for which its last ``load`` kept it from working."""


@runtime_checkable
class Preparing(Protocol):
    """A receiver that has something to end before it takes weights over. ``UpdatedWorker`` may finish its groups
    first.
    """

    def prepare(self, version: int) -> None:
        """Return once ``load`` may come; this takes what it takes, within a limit of the receiver's own."""

    def doing(self) -> str:
        """Return what keeps it, in words that go on after ``which``; an empty string where there is nothing to say."""


class Spreading(Protocol):
    """How a snapshot comes to its receivers before any of them takes it over. ``Spread``, a broadcast, is one."""

    @property
    def nbytes(self) -> int:
        """Bytes that a receiver gets."""

    def gather(self) -> None:
        """Copy the weights, which must not change meanwhile; ``bring`` may begin before."""

    def bring(self, receivers: Mapping[str, Receiver], version: int) -> Mapping[str, BaseException]:
        """Have the receivers keep them beside those that serve; by name what failed in those that have none of it."""


@dataclass(frozen=True)
class Snapshot:
    """Weights that stay as they are until the next snapshot.

    ``fingerprint`` computes what a receiver that took them over answers, in any thread. With ``spread``, weights must
    be brought to receivers by that before they ``load`` them.
    """

    weights: Weights
    fingerprint: Callable[[], str]
    spread: Spreading | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a receiver takes over."""
        return self.spread.nbytes if self.spread is not None else sum(tensor.nbytes for _, tensor in self.weights)


class SharedSnapshots:
    """Snapshots of an ``export``, each in place of the last, in memory that other processes can map.

    Floats are kept as ``dtype``, or without one as they are exported. ``base`` gives the fingerprint of what receivers
    have beside it, where it is adapters alone; it is asked once.
    """

    def __init__(
        self,
        export: Callable[[], Weights],
        *,
        base: Callable[[], str] | None = None,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 2**26,
    ) -> None:
        self._export, self._dtype = export, dtype
        self._base = None if base is None else cache(base)
        self._memory = SharedWeights(bucket_bytes)

    def __call__(self) -> Snapshot:
        """Return a copy of the weights as they are now."""
        beside = () if self._base is None else (self._base(),)
        self._memory.write(self._export(), self._dtype)
        return Snapshot(self._memory, lambda: joined(fingerprint(self._memory), *beside))


class WeightSync:
    """Pushes each version to all ``receivers`` (by name), which answer with a fingerprint that must be the snapshot's,
    and, where the ``probe`` says so, with the likeliest tokens after some prompts, which must be the trainer's.

    One push is under way at most: the next waits for it, so no version is skipped. ``require_actor`` refuses to publish
    other weights than the actor's. ``acknowledged(name, version)`` is called, in any thread, for each receiver that has
    answered rightly. ``overlap``: ``push`` returns once the snapshot is taken, and what goes wrong later is raised by
    the next call, whichever it is, until ``leave`` names the culprit. ``deadline_s`` is for a push to each receiver
    that is prepared for it, ``health_s`` for the answers to the health call before it.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        receivers: Mapping[str, Receiver],
        *,
        require_actor: Callable[[str], None],
        acknowledged: Callable[[str, int], None],
        probe: Probe | None = None,
        overlap: bool = False,
        deadline_s: float = 300.0,
        health_s: float = 60.0,
    ) -> None:
        self._snapshot, self._probe = snapshot, probe
        self._receivers = dict(receivers)
        self._require_actor, self._acknowledged = require_actor, acknowledged
        self._overlap, self._deadline_s, self._health_s = overlap, deadline_s, health_s
        self._version: int | None = None
        self._current: Snapshot | None = None
        self._expected: Expected | None = None  # of the current version
        self._unasked: set[str] = set()  # names of receivers that joined between two probes
        self._deliveries: dict[str, Transfer[float]] = {}
        self._awaited: tuple[str, Mapping[str, Transfer[Any]]] | None = None
        self._prepared: dict[str, float] = {}  # seconds, by receiver
        self._probed: dict[str, float] = {}
        self._arrived: dict[str, float] = {}
        self._arrivals: list[tuple[str, int, float, float]] = []

    @property
    def version(self) -> int | None:
        """The version of the last push; None before the first."""
        return self._version

    @property
    def nbytes(self) -> int:
        """Bytes that each receiver takes over in the last push; 0 before the first."""
        return 0 if self._current is None else self._current.nbytes

    @property
    def arrived(self) -> dict[str, float]:
        """Seconds of the last push that has arrived, each of the receiver that took the longest: ``drain``, until what
        was under way was finished, ``transfer``, ``apply``, while the receiver stood, ``probe``, if it was asked what
        it generates with. Empty before the first push.
        """
        return dict(self._arrived)

    def push(self, version: int) -> dict[str, float]:
        """Send the weights of this moment as ``version``, the one after the last.

        Gives seconds by phase: ``wait`` for the push before, ``health``, ``snapshot``, in which the trainer answers the
        probe too, and those of ``arrived``. Raises ``DeadlineError`` naming the receivers that are awaited,
        ``TandemError`` for one whose weights are not those that were sent.
        """
        self._require_actor("publish weights")
        phases: dict[str, float] = {}
        with _timed(phases, "wait"):
            self.wait()
        if self._version is not None and version != self._version + 1:
            raise ContractError(f"push of version {version} after {self._version}: versions are pushed one by one")
        with _timed(phases, "health"):
            self._check_health()
        with _timed(phases, "snapshot"):
            self._current = self._snapshot()
            self._expect(version)
        self._version = version
        self._send(self._current, version)
        if self._current.spread is not None:
            with _timed(phases, "gathering"):
                self._current.spread.gather()
            phases["snapshot"] += phases.pop("gathering")
        if not self._overlap:
            self.wait()
        return phases | self._arrived

    def wait(self) -> None:
        """Return once every receiver has acknowledged the last push."""
        self._join(self._deliveries, self._deadline_s, f"weights version {self._version}")
        self._settle()

    def check(self) -> None:
        """Raise what has gone wrong with the push under way, a passed deadline included; doesn't wait."""
        for transfer in self._deliveries.values():
            transfer.check()
        if any(transfer.late for transfer in self._deliveries.values()):
            self.wait()

    @property
    def blocked_by(self) -> str:
        """What is waited for at this moment, in any thread, and who blocks; empty where nothing is."""
        if self._awaited is None:
            return ""
        awaited, transfers = self._awaited
        names = self._names(list(transfers.items()))
        return f"waits for {awaited}; blocked by {names}" if names else ""

    def take_arrivals(self) -> list[tuple[str, int, float, float]]:
        """Return (receiver, version, begun, acknowledged) of what has arrived since the last look;
        ``time.perf_counter``.
        """
        taken, self._arrivals = self._arrivals, []
        return taken

    def close(self) -> None:
        """Wait for a push under way; nothing is pushed after it."""
        self.wait()
        self._receivers.clear()

    def join(self, name: str, receiver: Receiver) -> None:
        """Add a receiver, which loads the last version that was pushed before this returns.

        It is asked what it generates with then, or, where that version was not due, at the next push: by now the
        trainer may have other weights.
        """
        if name in self._receivers:
            raise ContractError(f"receiver {name!r} is there already; one that restarts leaves first")
        self.wait()
        if self._current is not None and self._version is not None:
            brought = self._spread({name: receiver}, self._current, self._version)
            transfer = self._deliver(name, receiver, self._current, self._version, self._current.fingerprint, brought)
            self._join({name: transfer}, self._deadline_s, f"weights version {self._version}")
            if self._expected is None and isinstance(receiver, Probed):
                self._unasked.add(name)
        self._receivers[name] = receiver

    def leave(self, name: str) -> None:
        """Note that the receiver is gone or given up: nobody waits for it any more, and its error is forgotten."""
        if name not in self._receivers:
            raise ContractError(f"receiver {name!r} is unknown; there are {sorted(self._receivers)}")
        del self._receivers[name]
        self._deliveries.pop(name, None)
        self._unasked.discard(name)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _expect(self, version: int) -> None:
        """Compute what receivers must answer to ``version``, if they are to be asked."""
        self._expected = None
        if self._probe is not None:
            self._expected = self._probe.expected(version, due=bool(self._unasked))
        if self._expected is not None:
            self._unasked.clear()

    def _send(self, snapshot: Snapshot, version: int) -> None:
        expected = Transfer("the fingerprint of the snapshot", snapshot.fingerprint)
        brought = self._spread(self._receivers, snapshot, version)
        self._deliveries = {
            name: self._deliver(name, receiver, snapshot, version, expected.result, brought)
            for name, receiver in self._receivers.items()
        }

    def _spread(
        self, receivers: Mapping[str, Receiver], snapshot: Snapshot, version: int
    ) -> Callable[[], Mapping[str, BaseException]]:
        """Begin to bring the snapshot to the receivers; returns what waits for the end, and tells who failed."""
        if snapshot.spread is None:
            return dict
        return Transfer("weights on their way", partial(snapshot.spread.bring, dict(receivers), version)).result

    def _deliver(
        self,
        name: str,
        receiver: Receiver,
        snapshot: Snapshot,
        version: int,
        expected: Callable[[], str],
        brought: Callable[[], Mapping[str, BaseException]],
    ) -> Transfer[float]:
        """Start a thread that loads, compares, asks and acknowledges; its result is the seconds of the load."""
        asked = self._expected

        def deliver() -> float:
            started = time.perf_counter()
            answer = receiver.load(snapshot.weights, version)
            seconds = time.perf_counter() - started
            sent = expected()
            if answer is None:
                raise TandemError(
                    f"{name} answered no fingerprint to weights version {version}, which have {sent}, so nothing shows "
                    "that it generates with them: let its load() copy them and answer tandem.models.fingerprint of "
                    "what it has then"
                )
            if answer not in (sent, LEFT_OUT):
                raise TandemError(
                    f"{name} answered fingerprint {answer} to weights version {version}, which have {sent}: "
                    "it does not generate with what was sent"
                )
            if answer != LEFT_OUT and asked is not None and isinstance(receiver, Probed):
                with _timed(self._probed, name):
                    objection = asked.objection(receiver.answer(asked.prompts))
                if objection is not None:
                    raise TandemError(
                        f"{name} does not generate with weights version {version}: {objection}. It got all of them "
                        f"(fingerprint {sent}); what it made of them is another model"
                    )
            self._acknowledged(name, version)
            self._arrivals.append((name, version, started, time.perf_counter()))
            return seconds

        def prepare() -> None:
            if name in (failed := brought()):  # the receiver works until all has arrived
                raise failed[name]
            if isinstance(receiver, Preparing):
                with _timed(self._prepared, name):
                    receiver.prepare(version)

        return Transfer(name, deliver, self._deadline_s, prepare)

    def _check_health(self) -> None:
        """Check that every receiver that can be asked answers in time, and has the version that it acknowledged."""
        calls = {
            name: Transfer(name, partial(receiver.ping, self._health_s), self._health_s)
            for name, receiver in self._receivers.items()
            if isinstance(receiver, HealthChecked)
        }
        self._join(calls, self._health_s, "an answer to the health call before a push")
        for name, call in calls.items():
            if self._version is not None and call.result() != self._version:
                raise TandemError(
                    f"{name} has weights version {call.result()}, it acknowledged {self._version}: it was started "
                    "anew, or loaded by somebody else. Let it leave and join"
                )

    def _join(self, transfers: Mapping[str, Transfer[Any]], seconds: float, awaited: str) -> None:
        """Wait for all, as long as each has time; raise the first error, or name those that are late."""
        self._awaited = awaited, transfers
        try:
            for transfer in transfers.values():
                transfer.join()
        finally:
            self._awaited = None
        for transfer in transfers.values():
            transfer.check()
        late = self._names(list(transfers.items()))
        if late:
            raise DeadlineError(f"waited {seconds:g} s for {awaited}; blocked by {late}")

    def _names(self, transfers: list[tuple[str, Transfer[Any]]]) -> str:
        """Return the receivers that are awaited, each with what it is doing, if it says so."""
        awaited = []
        for name, transfer in transfers:
            if transfer.under_way:
                receiver: object = self._receivers.get(name)
                doing = receiver.doing() if isinstance(receiver, Preparing) else ""
                awaited.append(f"{name}, which {doing}" if doing else name)
        return ", ".join(awaited)

    def _settle(self) -> None:
        """Note how long the push took that has arrived."""
        if not self._deliveries:
            return
        applied = {n: r.applied_s for n, r in self._receivers.items() if isinstance(r, HealthChecked)}
        transfers = [d.result() - applied.get(name, 0.0) for name, d in self._deliveries.items()]
        prepared = [self._prepared[name] for name in self._deliveries if name in self._prepared]
        drain = {"drain": max(prepared)} if prepared else {}
        probed = {"probe": max(self._probed.values())} if self._probed else {}
        self._prepared, self._probed = {}, {}
        self._arrived = {**drain, **probed, "transfer": max(transfers), "apply": max(applied.values(), default=0.0)}
        self._deliveries = {}


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - started
