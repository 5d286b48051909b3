"""Calls of ranks: a method of the rank with its arguments as one value, wherever the rank is.

``call(TrainRank.save_tag, REF)`` is checked where it is written: a method that ranks don't have, or an argument that
it doesn't take, is an error of the type checker. So a method is written once, in ``TrainRank``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from tandem.roles.train_rank import TrainRank
from tandem.weights.store import ACTOR

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=TrainRank)
RankT_co = TypeVar("RankT_co", bound=TrainRank, covariant=True)
RankT_contra = TypeVar("RankT_contra", bound=TrainRank, contravariant=True)
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Call(Generic[RankT_contra, T_co]):
    """What one rank is to do. Can be pickled where the arguments can: the method travels by its name."""

    method: Callable[..., T_co]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The method's, for messages."""
        return self.method.__name__

    def on(self, rank: RankT_contra) -> T_co:
        """Call the method on ``rank``; a subclass's own version of the method is the one that runs."""
        result: T_co = getattr(rank, self.name)(*self.args, **self.options)
        return result


def call(method: Callable[Concatenate[R, P], T], /, *args: P.args, **options: P.kwargs) -> Call[R, T]:
    """Return the call of a method of a class of ranks, such as ``call(TrainRank.optim_step, 12.0)``."""
    return Call(method, args, options)


class Reply(Protocol[T_co]):
    """The answer to one call. ``Done`` is one that is there already."""

    def result(self, timeout: float | None = None) -> T_co:
        """Return the result, or the rank's own error. Raises ``TimeoutError`` where there is neither after ``timeout``
        s.
        """


class RankHandle(Protocol[RankT_co]):
    """A rank somewhere. It works on one call after the other, in the order in which they were submitted. ``LocalRank``
    calls at once, ``RayRank`` asks an actor. All ranks of a group step, at the same time::

        replies = [rank.submit(call(TrainRank.optim_step, 12.0)) for rank in ranks]
        results = [reply.result(timeout=600.0) for reply in replies]
    """

    @property
    def name(self) -> str:
        """Which rank, and where, for messages."""

    def submit(self, call: Call[RankT_co, T]) -> Reply[T]:
        """Begin a call. Must not wait for the result, unless this is the only rank."""

    def aside(self, call: Call[RankT_co, T]) -> Reply[T]:
        """Make a call beside those of ``submit``, whatever the rank is doing; it must not touch the model."""

    def check(self) -> None:
        """Raise ``DiedError`` if the rank is gone; returns at once."""

    def silent_s(self) -> float:
        """Return the seconds since its process was asked for a sign of life, 0 where it has given it; one at work does
        too.
        """


class Done(Generic[T_co]):
    """A result that is there."""

    def __init__(self, value: T_co) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> T_co:
        """Return the result of the call, which has been made already."""
        del timeout
        return self._value


class LocalRank(Generic[RankT_co]):
    """The only rank, in this process: calls are made directly and nothing is copied."""

    def __init__(self, rank: RankT_co, role: str = ACTOR) -> None:
        self.rank = rank
        self.name = f"rank 0 of the {role} in this process"

    def submit(self, call: Call[RankT_co, T]) -> Done[T]:
        """Make the call, and give its result; its error is raised here."""
        return Done(call.on(self.rank))

    def aside(self, call: Call[RankT_co, T]) -> Done[T]:
        """Make the call in the thread that asks."""
        return Done(call.on(self.rank))

    def check(self) -> None:
        """Do nothing: a rank in this process lives as long as whoever asks."""

    def silent_s(self) -> float:
        """Return 0: the rank is where this is asked."""
        return 0.0
