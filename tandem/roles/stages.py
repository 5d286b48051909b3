"""What happens to a batch between its rewards and the train call, as a row of checked steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto


@dataclass(frozen=True)
class BatchStage:
    """One planned stage: ``run`` adds the columns ``gives`` to a batch that has the columns ``needs``.

    ``per`` is how much of a partition it must see at once.
    """

    name: str
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    run: Callable[[DataProto], DataProto]
    per: Literal["group", "sub_batch", "partition"] = "partition"

    def __call__(self, batch: DataProto) -> DataProto:
        """Run the stage. Raises ``ContractError`` where it got or gave other columns than planned."""
        if missing := [name for name in self.needs if name not in batch.columns]:
            raise ContractError(f"stage {self.name!r} needs column {missing[0]!r}; the batch has {batch.columns}")
        result = self.run(batch)
        added = set(result.columns) - set(batch.columns)
        if added != set(self.gives) - set(batch.columns):
            raise ContractError(f"stage {self.name!r} was planned to give {self.gives}, it gave {sorted(added)}")
        return result
