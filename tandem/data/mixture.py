"""A mix of data sets: one stream drawn from several by weight, seeded and resumable.

Which set a draw comes from is no matter of chance: it is the one that lags furthest behind its share. So after any
number of draws each set has had its share to within an item (n - 1 items of n sets), and the numbers drawn so far are
the whole state. The order within a set is its own: shuffled by the seed, begun anew when it is through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from tandem.base.errors import DataError
from tandem.data.catalog import Catalog, RowCounts
from tandem.data.sampler import Sampler, left_over, whole_batches

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol[T_co]):
    """Items drawn one after the other: of one data set, or of a mix. ``Counted`` is the first, ``Mixture`` the
    second.
    """

    @property
    def counts(self) -> RowCounts:
        """What became of the rows."""

    def take(self, count: int) -> Sequence[T_co]:
        """Return the next ``count`` items; fewer when fewer remain."""

    def total_steps(self, batch_size: int, steps: int | None = None) -> int:
        """Count the whole batches that a run from the start can make. Raises ``DataError`` when there is not even
        one.
        """

    def left_over(self, batch_size: int, steps: int) -> int:
        """Count the draws at the end of a run of ``steps`` that make no whole batch."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the place in the stream, as JSON data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises ``DataError`` if the data are not the same."""


class Counted(Sampler[T]):
    """Draws that know what became of their rows."""

    counts: RowCounts

    @classmethod
    def of(cls, rows: Catalog[Any], *, seed: int, shuffle: bool = True, epochs: int | None = None) -> Self:
        """Make a stream of draws from the usable ``rows`` of a catalogue, which bring their counts along."""
        made = cls(rows, seed=seed, shuffle=shuffle, epochs=epochs, fingerprint=rows.fingerprint)
        made.counts = rows.counts
        return made


def rows_in_words(source: Stream[Any], batch_size: int, steps: int) -> str:
    """Return what became of the rows, and what is left over at the end of a run of ``steps``; empty where all are
    used.
    """
    counts, left = source.counts, source.left_over(batch_size, steps)
    lines = [str(counts)] if counts.dropped or counts.cut or left else []
    return "; ".join([*lines, *([f"{left} left over at the end, less than a batch of {batch_size}"] if left else [])])


@dataclass(frozen=True)
class Part(Generic[T]):
    """One data set of a mix: ``draws`` without end, and its ``weight`` among the others."""

    name: str
    weight: float
    draws: Counted[T]


class Mixture(Generic[T]):
    """A ``Stream`` from ``parts`` by weight. An epoch is as many draws as all parts together have items."""

    def __init__(self, parts: Sequence[Part[T]], *, epochs: int | None = None) -> None:
        names = [part.name for part in parts]
        if not parts or len(set(names)) < len(names):
            raise DataError(f"a mix has parts of different names, not {', '.join(names) or 'none'}")
        bounded = [part.name for part in parts if part.draws.epochs is not None]
        if bounded:
            raise DataError(f"{bounded[0]}: a part of a mix is drawn without end")
        self.parts, self.epochs = list(parts), epochs
        whole = sum(part.weight for part in parts)
        self._shares = [part.weight / whole for part in parts]

    def __len__(self) -> int:
        """Return the number of items in one epoch: those of all parts together."""
        return sum(len(part.draws) for part in self.parts)

    @property
    def drawn(self) -> dict[str, int]:
        """Items drawn so far of each part."""
        return {part.name: part.draws.drawn for part in self.parts}

    @property
    def counts(self) -> RowCounts:
        """What became of the rows of all parts together."""
        every = [part.draws.counts for part in self.parts]
        dropped: dict[str, int] = {}
        for counts in every:
            for reason, count in counts.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + count
        return RowCounts(sum(c.rows for c in every), sum(c.kept for c in every), sum(c.cut for c in every), dropped)

    def take(self, count: int) -> list[T]:
        """Return the next ``count`` items, each from the part that is furthest behind its share."""
        if self.epochs is not None:
            count = min(count, self.epochs * len(self) - sum(self.drawn.values()))
        return [item for _ in range(count) for item in self._due().draws.take(1)]

    def total_steps(self, batch_size: int, steps: int | None = None) -> int:
        """Count the whole batches that a run over the mix can make. Raises ``DataError`` where nothing bounds it."""
        return whole_batches(len(self), self.epochs, batch_size, steps)

    def left_over(self, batch_size: int, steps: int) -> int:
        """Count the draws at the end of a run of ``steps`` over the mix that make no whole batch."""
        return left_over(len(self), self.epochs, batch_size, steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the mix and the place in each of its parts, as JSON data."""
        return {
            "weights": {part.name: part.weight for part in self.parts},
            "parts": {part.name: part.draws.state_dict() for part in self.parts},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in every part where ``state`` was taken. Raises ``DataError`` for another mix or other data."""
        weights = {part.name: part.weight for part in self.parts}
        saved = state.get("weights")
        if saved != weights:
            raise DataError(
                f"the training data are not those of the saved run (the mix was {saved!r}, is {weights!r}). Resume "
                "with the same mix, or start a new run from the saved model"
            )
        for part in self.parts:
            part.draws.load_state_dict(state["parts"][part.name])

    def _due(self) -> Part[T]:
        """Return the part that lags furthest behind its share; the first of them where several do."""
        drawn = [part.draws.drawn for part in self.parts]
        total = sum(drawn) + 1
        lag = [share * total - count for share, count in zip(self._shares, drawn, strict=True)]
        return self.parts[lag.index(max(lag))]
