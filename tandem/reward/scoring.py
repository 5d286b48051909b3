"""Scorers made ready to run: from a specification to an object that gives verdicts and lets no exception out."""

from __future__ import annotations

import inspect
import traceback
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.base.errors import TandemError
from tandem.reward.outcome import Sample, Verdict, as_verdict, as_verdicts, failed
from tandem.reward.parts import Part
from tandem.reward.registry import CallStyle, ScorerTarget, call_style

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto

_LONGEST_REASON = 500  # characters

T = TypeVar("T")


@dataclass(frozen=True)
class ScorerSpec:
    """Where a scorer's code is and its parameters: plain data, so that another process can make the same scorer.

    The code is in ``file`` if given, else in the importable ``module``; ``attribute`` is its name there, empty for an
    entry known only by its registered ``type``. ``packages`` are imported before the first sample. ``parts`` belong to
    a scorer that combines others, whose ``call`` is what they need together.
    """

    type: str
    module: str
    attribute: str
    call: CallStyle
    file: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    parts: tuple[tuple[Part, ScorerSpec], ...] = ()


class Scorer(ABC):
    """A bound scorer, called in the given style. What goes wrong inside becomes a ``failed`` verdict."""

    def __init__(self, call: CallStyle) -> None:
        self.call = call

    @abstractmethod
    async def score(self, sample: Sample) -> Verdict:
        """Return the verdict of one sample."""

    async def score_batch(self, data: DataProto | None, samples: Sequence[Sample]) -> list[Verdict]:
        """Return the verdicts of a batch; ``samples`` are the rows of ``data``, which only a batch scorer reads."""
        return [await self.score(sample) for sample in samples]


class SampleScorer(Scorer):
    """A function of one sample, or an object called like one."""

    def __init__(self, function: ScorerTarget, call: CallStyle, parameters: Mapping[str, Any]) -> None:
        super().__init__(call)
        self._function = function
        self._indices = tuple(Sample._fields.index(name) for name in call.fields)
        self._parameters = dict(parameters)

    async def score(self, sample: Sample) -> Verdict:
        try:
            value = self._function(*[sample[i] for i in self._indices], **self._parameters)
            return as_verdict(await value if self.call.is_async else value)
        except Exception as error:
            return failed(describe_error(error))


class BatchScorer(Scorer):
    """An object whose call scores a DataProto."""

    def __init__(self, manager: ScorerTarget, call: CallStyle) -> None:
        super().__init__(call)
        self._manager = manager

    async def score(self, sample: Sample) -> Verdict:
        raise TandemError("a batch scorer can't score a single sample: call score_batch")

    async def score_batch(self, data: DataProto | None, samples: Sequence[Sample]) -> list[Verdict]:
        try:
            values = self._manager(data)
            return as_verdicts(await values if self.call.is_async else values, len(samples))
        except Exception as error:
            return [failed(describe_error(error))] * len(samples)


def bind_target(target: ScorerTarget, name: str, parameters: Mapping[str, Any]) -> Scorer:
    """Return a scorer of a function or object, or of a class, which is constructed here.

    Raises ``TandemError`` if it can't be called as a scorer; what a constructor raises passes through.
    """
    call = call_style(target, name)
    if inspect.isclass(target):
        made: Any = target(**parameters)
        return BatchScorer(made, call) if call.is_batch else SampleScorer(made, call, {})
    return BatchScorer(target, call) if call.is_batch else SampleScorer(target, call, parameters)


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that has nothing to wait for, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a scorer that isn't async waited for something")


def describe_error(error: BaseException) -> str:
    """Return ``ValueError: message (file.py:12)``, of the innermost frame, at most 500 characters."""
    try:
        message = str(error)
    except Exception:
        message = "(its message can't be shown)"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message[:_LONGEST_REASON]}{where}"
