"""The stages of a run as its loop calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.stages.stage import BatchStage, Phase, PlannedStage, Stage
from tandem.stages.table import BUILT_IN


class StageTable:
    """The planned stages that the actor's loop runs on batches, each inside ``executing(name)``.

    A loop lists the stages that it is made for: those that aren't planned are skipped, and those of plug-ins join at
    the place that follows from their columns. One that is planned and not listed is a ``ContractError``: the loop would
    leave it out in silence.
    """

    def __init__(self, stages: Sequence[BatchStage], executing: Callable[[str], AbstractContextManager[None]]) -> None:
        self.stages = tuple(stages)
        self._executing = executing

    def forward(self, batch: DataProto, *listed: Stage) -> DataProto:
        """Return a part of a partition with the columns of the stages that take one as it arrives."""
        return self._run(batch, "sub_batch", listed)

    def complete(self, batch: DataProto, *listed: Stage) -> DataProto:
        """Return a partition with the columns of the stages that see all of it."""
        return self._run(batch, "partition", listed)

    def update(self, batch: DataProto, *listed: Stage) -> DataProto:
        """Return the same batch, once those are trained on it that are trained before the actor."""
        return self._run(batch, "partition", listed, changes_weights=True)

    def _run(self, batch: DataProto, phase: Phase, listed: Sequence[Stage], changes_weights: bool = False) -> DataProto:
        chosen = [one for one in self.stages if one.phase == phase and one.changes_weights == changes_weights]
        require_listed(chosen, listed, "the loop")
        for stage in chosen:
            with self._executing(stage.name):
                batch = stage(batch)
        return batch


def require_listed(planned: Iterable[PlannedStage | BatchStage], listed: Iterable[Stage], who: str) -> None:
    """Raise ``ContractError`` where a built-in stage is planned that ``who`` doesn't do."""
    done = {stage.name for stage in listed}
    built_in = {stage.name for stage in BUILT_IN}
    missing = [stage.name for stage in planned if stage.name in built_in - done]
    if missing:
        raise ContractError(f"{who} does not do the planned stage {missing[0]!r}: list it where the others are")
