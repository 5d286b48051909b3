"""What makes the order of events certain: a log that threads wait on, and engines that wait for what it says."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tandem.columns.proto import DataProto
from tandem.dataflow.tickets import Ticket
from tandem.models.fingerprint import fingerprint
from tandem.models.loading import load_causal_lm
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, SampleOutput, Sampling
from tandem.session.rollout import Workers
from tandem.session.session import Session
from tandem.train.protocol import TopTokens
from tests.e2e.seven import prepare, training_engine

PATIENCE_S = 30.0
"""For an event that would never come, were something broken."""


class EventLog:
    """Events in the order in which they happened, in any thread."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._news = threading.Condition()

    def note(self, event: str) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Look again and again, but not for ever."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"{what} did not come; there were {self.events}"
            self.pause()

    def happened(self, event: str) -> bool:
        with self._news:
            return event in self.events

    def pause(self) -> None:
        """Until something happens, or a moment has passed."""
        with self._news:
            self._news.wait(0.01)

    def before(self, first: str, second: str) -> bool:
        """Whether the first ``first`` came before the first ``second``."""
        return self.events.index(first) < self.events.index(second)


class SlowEngine:
    """Random digits that depend on the seeds alone; notes ``group K.PLACE`` as each ends.

    A group ends once ``may_end(ticket)``; a load of version v returns once ``may_load(v)``. ``loaded`` are the
    fingerprints of what came. Asked for greedy answers, as at a push, it gives those of the weights that came.
    """

    answering: RolloutEngine

    def __init__(
        self,
        log: EventLog,
        *,
        may_end: Callable[[Ticket], bool] = lambda ticket: True,
        may_load: Callable[[int], bool] = lambda version: True,
    ) -> None:
        self.version = -1
        self.loaded: dict[int, str] = {}
        self._log, self._may_end, self._may_load = log, may_end, may_load

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        if sampling.greedy:
            yield from self.answering.generate(requests, sampling)
            return
        source, held, more = iter(requests), list[GroupRequest](), True
        while more or held:
            while more:
                try:
                    request = next(source)
                except StopIteration:
                    more = False
                    break
                if request is None:
                    break
                held.append(request)
            free = [request for request in held if self._may_end(ticket_of(request))]
            if free:
                held.remove(free[0])
                ticket = ticket_of(free[0])
                self._log.note(f"group {ticket.partition}.{ticket.place}")
                yield GroupOutput(free[0], tuple(self._sample(seed, sampling) for seed in free[0].seeds))
            elif held:
                self._log.pause()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        assert weights is not None
        while not self._may_load(version):
            self._log.pause()
        pairs = list(weights)
        self.loaded[version] = fingerprint(pairs)
        self.answering.load(pairs, version)
        self.version = version
        return self.loaded[version]

    def pause(self, abort: bool = False) -> None:
        pass

    def resume(self) -> None:
        pass

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def _sample(self, seed: int, sampling: Sampling) -> SampleOutput:
        tokens = torch.randint(1, 11, (sampling.max_tokens,), generator=torch.Generator().manual_seed(seed % 2**63))
        versions = torch.full((sampling.max_tokens,), self.version, dtype=torch.int32)
        return SampleOutput(tokens, torch.full((sampling.max_tokens,), -2.3), versions, "length")


def ticket_of(request: GroupRequest) -> Ticket:
    """The ticket that a request fills."""
    place, partition, attempt = map(int, re.findall(r"\d+", str(request.key)))
    return Ticket(partition, place, attempt)


Streaming = Session[Workers]
"""A session whose rollout goes on beside training."""


def streaming(*words: object) -> Streaming:
    """A session whose rollout goes on beside training, on partitions of 4 groups."""
    session = prepare(*map(str, words))
    assert isinstance(session.rollout, Workers)
    return session


def with_engine(session: Streaming, engine: SlowEngine) -> None:
    """Let the only stream generate with another engine."""
    (stream,) = session.rollout.alive
    engine.answering = HfEngine(load_causal_lm(training_engine(session).model.model.config._name_or_path))
    stream.engine = engine


def observe(session: Streaming, log: EventLog, patch: pytest.MonkeyPatch) -> list[DataProto]:
    """Note what the actor does: ``forward K``, ``backward K``, ``seal K``, ``acknowledged V``; the trained batches."""
    trainer: Any = training_engine(session)
    batches: list[DataProto] = []

    def forward(batch: DataProto, want: Sequence[object]) -> str | None:
        """But for what engines are compared with at a push."""
        probes = any(isinstance(asked, TopTokens) for asked in want)
        return None if probes else f"forward {session.run.progress.step}"

    def noting(target: Any, name: str, event: Callable[..., str | None]) -> None:
        call = getattr(target, name)

        def noted(*args: Any, **options: Any) -> Any:
            if (happened := event(*args)) is not None:
                log.note(happened)
            return call(*args, **options)

        patch.setattr(target, name, noted)

    noting(trainer, "forward", forward)
    noting(trainer, "forward_backward", lambda *_: f"backward {session.run.progress.step}")
    noting(session.plane, "seal", lambda partition, *_: f"seal {partition}")
    noting(session.rollout.gate, "acknowledge", lambda _, version: f"acknowledged {version}")

    def end_step(step: int, batch: DataProto, update: dict[str, float]) -> None:
        batches.append(batch)
        type(session.run).end_step(session.run, step, batch, update)

    object.__setattr__(session.run, "end_step", end_step)
    return batches
