"""The teacher stage: each sample is scored by the teacher of its data source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.base.errors import DataError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.train.protocol import TopTokens, Wanted

Forward = Callable[[DataProto, Sequence[Wanted]], Mapping[str, Ragged]]
"""``TrainEngine.forward`` of a teacher, wherever it is."""

COLUMNS = {"logprobs": "teacher_logprobs", "top_logprobs": "teacher_topk_logprobs", "top_ids": "teacher_topk_ids"}
"""Result of a forward -> column."""


@dataclass(frozen=True)
class TeacherStage:
    """Adds a teacher's columns to a batch.

    ``forwards`` by teacher; ``by_source`` says whose teacher is which, ``rest`` is that of all other sources. ``want``
    is what a teacher is asked for: the log-probs of the sampled tokens, or its likeliest tokens.
    """

    forwards: Mapping[str, Forward]
    by_source: Mapping[str, str]
    rest: str | None
    want: Wanted

    def __call__(self, batch: DataProto) -> DataProto:
        """Return the batch with the columns. Raises ``DataError`` for a sample that has no teacher."""
        if not self.by_source and self.rest is not None:
            return self._with(batch, self.forwards[self.rest](batch, [self.want]))
        names = [self._teacher(batch, row) for row in range(len(batch))]
        rows = {name: [row for row, own in enumerate(names) if own == name] for name in dict.fromkeys(names)}
        found = [self.forwards[name](batch[own], [self.want]) for name, own in rows.items()]
        back = torch.argsort(torch.tensor([row for own in rows.values() for row in own], dtype=torch.int64))
        return self._with(batch, {key: Ragged.concat([part[key] for part in found]).take(back) for key in found[0]})

    def _teacher(self, batch: DataProto, row: int) -> str:
        source = batch.non_tensor_batch["data_source"][row]
        name = self.by_source.get(source, self.rest)
        if name is None:
            known = ", ".join(self.by_source)
            raise DataError(
                f"sample {row} is of the data source {source!r}, which has no teacher (those of {known} have one): "
                "name one in actor_rollout_ref.teacher.by_source, or one for the rest in actor_rollout_ref.teacher.path"
            )
        return name

    def _with(self, batch: DataProto, found: Mapping[str, Ragged]) -> DataProto:
        return batch.union(DataProto({COLUMNS[key]: column for key, column in found.items()}))


def wanted_of_teacher(columns: Sequence[str], top_k: int | None, vocabulary: int) -> Wanted:
    """Return what a forward is asked for to give these ``columns``; ids below the student's ``vocabulary``."""
    if "teacher_topk_ids" in columns and top_k is not None:
        return TopTokens(top_k, vocabulary)
    return "logprobs"
