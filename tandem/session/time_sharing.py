"""The live handles of colocate where engines have weights of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.session.streaming import StreamingSession


@dataclass(frozen=True)
class TimeSharingSession(StreamingSession):
    """A streaming session in which nothing streams: the loops rest while the actor has its turn on the devices."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """See ``Session.running``; the loops are there from the start, resting."""
        with super().running():
            self.rollout_workers.rest()
            self.composite.engine.sleep()
            with self.streaming():
                yield

    @contextmanager
    def generating(self) -> Iterator[None]:
        """See ``Session.generating``."""
        with super().generating():
            self.rollout_workers.work()
            yield
            with self._awaiting("resting its engines"):
                self.rollout_workers.rest()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """See ``Session.evaluating``: the engines' turn, but the loops rest; they would begin the next partition."""
        with super().evaluating():
            self._to_engine()
            yield
            self._to_actor()
