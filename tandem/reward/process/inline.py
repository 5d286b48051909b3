"""Scoring in the caller's own thread: for a debugger, a notebook, a scorer defined in the script that runs."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.base.deadline import Deadline
from tandem.base.errors import ContractError
from tandem.reward.outcome import Sample, Scores, Verdict
from tandem.reward.process.job import Group, Handle
from tandem.reward.samples import samples_of
from tandem.reward.scoring import Scorer, run_now
from tandem.reward.temporary import clear_left_over


class InlineScoring:
    """What ``ScoringPool`` does, without processes: ``submit`` scores and then returns.

    There is no deadline: a scorer that hangs hangs the caller, and one that ends the process ends the run.
    """

    def __init__(self, scorer: Scorer) -> None:
        clear_left_over()
        self._scorer = scorer

    def __enter__(self) -> InlineScoring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def await_ready(self) -> None:
        """Return at once: the scorer was made before this was."""

    def submit(self, group: Group, label: str = "group") -> Handle:
        """Score the samples of a group."""
        handle = Handle(label, len(group))
        scoring = self._score(group)
        if self._scorer.call.is_async:
            import asyncio

            handle.put(0, asyncio.run(scoring))
        else:
            handle.put(0, run_now(scoring))
        return handle

    def collect(self, handle: Handle, deadline: Deadline) -> Scores:
        """Return the scores of a group."""
        return handle.scores()

    def check(self) -> None:
        """Do nothing: nothing can be wrong with a process here; what goes wrong is in the verdicts."""

    def activity(self) -> str:
        """Return "nothing": a scoring has ended when ``submit`` returns."""
        return "nothing"

    def close(self) -> None:
        """Do nothing: there is no process to end."""

    async def _score(self, group: Group) -> list[Verdict]:
        call = self._scorer.call
        if not call.is_batch:
            samples = group if isinstance(group, Sequence) else samples_of(group)
            return [await self._scorer.score(sample) for sample in samples]
        if isinstance(group, Sequence):
            raise ContractError("this reward scores batches: submit a DataProto, not samples")
        rows = samples_of(group) if call.fields else [Sample("")] * len(group)
        return await self._scorer.score_batch(group, rows)
