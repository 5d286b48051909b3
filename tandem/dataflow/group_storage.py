"""The tensors of a store: groups of samples as slices of what was put. Who may read or write, the ledger decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.dataflow.tickets import Ticket

IDENTITY = ("group_ids", "sample_index")  # made from the tickets, so that they can't be wrong

Column: TypeAlias = Tensor | Ragged | list[Any]
Columns: TypeAlias = dict[str, Column]
Slice: TypeAlias = tuple[Column, int]  # a put's column and the row in it where a group begins
Pieces: TypeAlias = dict[str, list[Column]]


class GroupStorage:
    """Groups of ``samples`` samples, each column kept as it was put: nothing is copied.

    Every attempt of a ticket is a group of its own, so that what a late producer does can't touch its successor's data.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._groups: dict[int, dict[Ticket, dict[str, Slice]]] = {}  # by partition

    def add(self, ticket: Ticket, columns: Columns, row: int) -> None:
        """Keep columns of a group, from ``row`` on. What is there stays."""
        group = self._groups.setdefault(ticket.partition, {}).setdefault(ticket, {})
        for name, column in columns.items():
            group.setdefault(name, (column, row))

    def free(self, ticket: Ticket) -> None:
        """Let go of a group, if it is here."""
        self._groups.get(ticket.partition, {}).pop(ticket, None)

    def free_partition(self, partition: int) -> None:
        """Let go of all groups of a partition."""
        self._groups.pop(partition, None)

    def pieces(self, tickets: Sequence[Ticket], names: Iterable[str]) -> Pieces:
        """Return each column's rows as few slices of what was put, in the order of the tickets.

        Raises ``ContractError`` for a group that isn't here or that lacks a column.
        """
        groups = [self._held(ticket) for ticket in tickets]
        return {name: self._cut(name, tickets, groups) for name in names}

    def _held(self, ticket: Ticket) -> dict[str, Slice]:
        group = self._groups.get(ticket.partition, {}).get(ticket)
        if group is None:
            raise ContractError(f"get: {ticket} holds no group (any more); was it dropped, or never put?")
        return group

    def _cut(self, name: str, tickets: Sequence[Ticket], groups: Iterable[dict[str, Slice]]) -> list[Column]:
        runs: list[tuple[Column, int, int]] = []
        for ticket, group in zip(tickets, groups, strict=True):
            if name not in group:
                raise ContractError(f"get: column {name!r} is not ready in {ticket}; it has {sorted(group)}")
            column, row = group[name]
            if runs and runs[-1][0] is column and runs[-1][2] == row:
                runs[-1] = (column, runs[-1][1], row + self._samples)
            else:
                runs.append((column, row, row + self._samples))
        return [column if start == 0 and stop == len(column) else column[start:stop] for column, start, stop in runs]


def as_columns(tickets: Sequence[Ticket], data: DataProto, samples: int) -> Columns:
    """Return the columns of a put. Raises ``ContractError`` unless rows and identity are those of the tickets."""
    if len(data) != samples * len(tickets):
        raise ContractError(f"put: {len(tickets)} tickets of {samples} samples need as many rows, got {len(data)}")
    right = identity(tickets, samples)
    for name in IDENTITY:
        if name in data.batch and not torch.equal(data.dense(name).cpu(), right[name]):
            raise ContractError(
                f"put: column {name!r} must be {right[name].tolist()[:8]}… as the tickets say, "
                f"got {data.dense(name).tolist()[:8]}…"
            )
    columns: Columns = {**data.batch, **data.non_tensor_batch}
    return {name: column for name, column in columns.items() if name not in IDENTITY}


def without_identity(columns: Iterable[str]) -> list[str]:
    """Return the columns that a store really holds."""
    return [name for name in columns if name not in IDENTITY]


def identity(tickets: Sequence[Ticket], samples: int) -> dict[str, Tensor]:
    """Return ``group_ids`` (= place of the ticket) and ``sample_index`` (= index in the group) of rows in ticket
    order.
    """
    places = torch.tensor([ticket.place for ticket in tickets], dtype=torch.int64)
    index = torch.arange(samples).repeat(len(tickets))
    return {"group_ids": places.repeat_interleave(samples), "sample_index": index}


def as_batch(tickets: Sequence[Ticket], samples: int, columns: Columns) -> DataProto:
    """Return what a get gives: columns in ticket order, with the identity of their rows."""
    return DataProto(
        {
            **{name: column for name, column in columns.items() if not isinstance(column, list)},
            **identity(tickets, samples),
        },
        {name: column for name, column in columns.items() if isinstance(column, list)},
    )


def join(pieces: list[Column]) -> Column:
    """Return all rows of the pieces, which are of one kind; a single piece as it is."""
    if len(pieces) == 1:
        return pieces[0]
    ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
    if ragged:
        return Ragged.concat(ragged)
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    if tensors:
        return torch.cat(tensors)
    return [item for piece in pieces if isinstance(piece, list) for item in piece]
