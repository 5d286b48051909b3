"""More groups than a partition needs, on all engines of a run: the first that are done are taken, the rest is ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from tandem.columns.proto import DataProto
from tandem.data.prompts import Prompt
from tandem.dataflow.gate import Gate
from tandem.dataflow.spares import Spares
from tandem.dataflow.tickets import Ticket
from tandem.roles.rollout.making import Made
from tandem.rollout.protocol import Cancelling, RolloutEngine

Finished: TypeAlias = tuple[Prompt, Made]


@dataclass
class _Asked:
    """The groups that were begun for a partition, and the tokens (S,) int64 of samples that were and weren't taken."""

    begun: set[Ticket] = field(default_factory=set)
    cancelled: int = 0
    taken: list[torch.Tensor] = field(default_factory=list)
    ended: list[torch.Tensor] = field(default_factory=list)


class SpareGroups:
    """What the loops of all engines ask of their groups; for any threads.

    ``spares`` decides which are taken; the tickets of ``gate`` are those of own and of spare places. An engine that is
    not ``Cancelling`` would make groups that nobody wants: the plan refuses it.
    """

    def __init__(self, spares: Spares[Finished], gate: Gate) -> None:
        self._spares, self._gate = spares, gate
        self._engines: dict[str, Cancelling] = {}
        self._asked: dict[int, _Asked] = {}
        self._lock = threading.Lock()  # of what is counted

    def join(self, name: str, engine: RolloutEngine) -> None:
        """Let the engine be told of groups that nobody wants; it takes the place of one of the same name."""
        if isinstance(engine, Cancelling):
            self._engines[name] = engine

    @property
    def tickets(self) -> int:
        """Groups that a partition has."""
        return self._spares.tickets

    def is_spare(self, ticket: Ticket) -> bool:
        """Return whether the prompt of the ticket is one more than the partition has."""
        return self._spares.is_spare(ticket)

    def wants(self, ticket: Ticket) -> bool:
        """Return whether the group of the ticket may still become one of its partition."""
        return self._spares.wants(ticket)

    def begin(self, ticket: Ticket) -> bool:
        """Note that the ticket's group is begun; False where the partition has all its groups, and it must not be."""
        if not self._spares.wants(ticket):
            self._gate.done(ticket)
            return False
        with self._lock:
            self._asked.setdefault(ticket.partition, _Asked()).begun.add(ticket)
        return True

    def arrived(self, name: str, ticket: Ticket, prompt: Prompt, made: Made) -> Sequence[tuple[Ticket, Finished]]:
        """Return which tickets are filled now, and by what; they are in the hands of the engine ``name``.

        Groups that nobody wants from here on are ended on whichever engine they are.
        """
        arrival = self._spares.arrived(ticket, (prompt, made))
        if self.is_spare(ticket):
            self._gate.done(ticket)
        for filled, _ in arrival.placed:
            if filled != ticket:
                self._gate.take_over(filled, name)
        for cancelled in arrival.cancelled:
            if self.is_spare(cancelled):
                self._gate.done(cancelled)
        if arrival.cancelled:
            for engine in list(self._engines.values()):
                engine.cancel([str(cancelled) for cancelled in arrival.cancelled])
        with self._lock:
            asked = self._asked.get(ticket.partition)
            if asked is not None:  # else it is over and reported
                asked.cancelled += sum(cancelled in asked.begun for cancelled in arrival.cancelled)
                asked.taken += [_lengths(group) for _, (_, group) in arrival.placed]
        if arrival.late:
            self._count_ended(ticket, made)
        return [(filled, (asker, _at(filled.place, group))) for filled, (asker, group) in arrival.placed]

    def late(self, ticket: Ticket, made: Made) -> None:
        """Count a group whose place another's has filled."""
        self._spares.forget(ticket)
        self._count_ended(ticket, made)

    def _count_ended(self, ticket: Ticket, made: Made) -> None:
        with self._lock:
            if ticket.partition in self._asked:
                self._asked[ticket.partition].ended.append(_lengths(made))

    def dropped(self, ticket: Ticket) -> None:
        """Note that a group that was taken is dropped; its ticket is drawn anew afterwards."""
        self._spares.reopened(ticket)

    def report(self, partition: int) -> dict[str, float]:
        """Return the metrics of a partition that is over; what is ended later isn't in them."""
        with self._lock:
            asked = self._asked.pop(partition, _Asked())
        taken = torch.cat([torch.zeros(0), *asked.taken])
        every = torch.cat([taken, *asked.ended])
        found = {"oversample/asked": float(len(asked.begun)), "oversample/cancelled": float(asked.cancelled)}
        if len(taken):
            found |= {"oversample/length_taken": float(taken.mean()), "oversample/length_asked": float(every.mean())}
        return found


def _at(place: int, made: Made) -> Made:
    """Return the group as the one of ``place``."""
    batch = DataProto(made.batch.batch, made.batch.non_tensor_batch, made.batch.meta_info, made.batch.tokenizer)
    batch.batch["group_ids"] = torch.full((len(batch),), place, dtype=torch.int64)
    return replace(made, batch=batch)


def _lengths(made: Made) -> torch.Tensor:
    """Return the tokens (S,) of each sample of a group."""
    return made.batch.ragged("responses").lengths.float()
