"""Scorers made of other scorers: their weighted sum, or one of them by the data set that a sample is from."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from tandem.base.registry import Scope
from tandem.reward.outcome import Outcome, Sample, Verdict, failed, unusable
from tandem.reward.parts import DEFAULT_ROUTES, Part
from tandem.reward.registry import REWARDS, CallStyle, no_objection
from tandem.reward.scoring import Scorer

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto


class Combined(Scorer):
    """A scorer made of the ``parts`` that its YAML lists. ``fields`` of a sample it reads itself."""

    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parts: Sequence[tuple[Part, Scorer]]) -> None:
        super().__init__(joint_style([scorer.call for _, scorer in parts], self.fields))
        self._parts = parts

    @abstractmethod
    async def score(self, sample: Sample) -> Verdict:
        """Return the verdict of one sample."""


@REWARDS.register("weighted_sum", scope=Scope.SEQUENCE, packages=(), check=no_objection)
class WeightedSum(Combined):
    """The sum of ``weight`` times the score of each part.

    YAML: ``parts: [{type: NAME, weight: W, name: METRIC, file: FILE, ...parameters}, ...]``; ``weight`` is 1 and
    ``name`` is the type where they are not written. Each part's score becomes a metric under its name, and the weighted
    scores are the components of the reward. A sample is scored only if every part scored it.
    """

    def __init__(self, parts: Sequence[tuple[Part, Scorer]]) -> None:
        super().__init__(parts)

    async def score(self, sample: Sample) -> Verdict:
        return self._total([await scorer.score(sample) for _, scorer in self._parts])

    async def score_batch(self, data: DataProto | None, samples: Sequence[Sample]) -> list[Verdict]:
        columns = [await scorer.score_batch(data, samples) for _, scorer in self._parts]
        return [self._total(row) for row in zip(*columns, strict=True)]

    def _total(self, verdicts: Sequence[Verdict]) -> Verdict:
        metrics: dict[str, float] = {}
        notes: dict[str, str] = {}
        terms: list[float] = []
        for (part, _), verdict in zip(self._parts, verdicts, strict=True):
            if verdict.outcome is not Outcome.SCORED:
                return Verdict(math.nan, verdict.outcome, f"{part.name}: {verdict.reason}")
            terms.append(part.weight * verdict.reward)
            metrics[part.name] = verdict.reward
            metrics.update({f"{part.name}/{key}": number for key, number in verdict.metrics.items()})
            notes.update({f"{part.name}/{key}": text for key, text in verdict.notes.items()})
        total = sum(terms)
        if reasons := [reason for number in (*terms, total) if (reason := unusable(number)) is not None]:
            return failed(f"the weighted sum has {reasons[0]}")
        return Verdict(total, metrics=metrics, components=tuple(terms), notes=notes)


@REWARDS.register("by_source", scope=Scope.SEQUENCE, packages=(), check=no_objection)
class BySource(Combined):
    """The scorer of the first route whose ``source`` fits the sample's ``data_source``.

    YAML: ``routes: [{source: NAME, type: NAME, file: FILE, ...parameters}, ...]``; ``source`` is a name or a list of
    names, in which ``*`` stands for any text. Without ``routes``, those of commonly published data sets. A sample that
    no route is for fails.
    """

    fields: ClassVar[tuple[str, ...]] = ("data_source",)

    def __init__(self, routes: Sequence[Any] = DEFAULT_ROUTES) -> None:
        super().__init__(routes)

    async def score(self, sample: Sample) -> Verdict:
        scorer = self._route(sample.data_source)
        return await scorer.score(sample) if scorer is not None else self._lost(sample.data_source)

    async def score_batch(self, data: DataProto | None, samples: Sequence[Sample]) -> list[Verdict]:
        verdicts = [self._lost(sample.data_source) for sample in samples]
        scorers = [self._route(sample.data_source) for sample in samples]
        for _, scorer in self._parts:
            rows = [i for i, chosen in enumerate(scorers) if chosen is scorer]
            if rows:
                part = None if data is None else data[rows]
                for i, verdict in zip(rows, await scorer.score_batch(part, [samples[i] for i in rows]), strict=True):
                    verdicts[i] = verdict
        return verdicts

    def _route(self, source: str | None) -> Scorer | None:
        name = "" if source is None else str(source)
        fitting = (s for part, s in self._parts if any(fnmatchcase(name, pattern) for pattern in part.sources))
        return next(fitting, None)

    def _lost(self, source: str | None) -> Verdict:
        known = ", ".join(pattern for part, _ in self._parts for pattern in part.sources)
        return failed(f"no route is for data_source {source!r}; there are {known}. Add {{source: {source}, type: ...}}")


def joint_style(calls: Sequence[CallStyle], own: Sequence[str] = ()) -> CallStyle:
    """Return what scorers need together: their ``own`` fields and all others'; a batch, or to be awaited, where any
    does.
    """
    fields = tuple(dict.fromkeys([*own, *(name for call in calls for name in call.fields)]))
    return CallStyle(fields, any(call.is_batch for call in calls), any(call.is_async for call in calls))
