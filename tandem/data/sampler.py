"""Sampler: a flat, seeded, resumable stream of items over epochs.

Epochs are joined end to end: with 10 items a batch may hold the last 2 of one epoch and the first 2 of the next, so no
item is dropped or drawn twice. The number of draws made is the whole state; epoch and position follow from it, which
makes the end of an epoch a place like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.base.errors import DataError
from tandem.base.seeding import derive_seed

T = TypeVar("T")


class Sampler(Generic[T]):
    """Draws from ``items`` (at least one), each once per epoch.

    ``shuffle``: a new order every epoch, by ``seed``; else the order of ``items``. ``epochs``: how many passes;
    ``None`` never ends. ``fingerprint`` stands for the content of ``items``: a state of other content is refused.
    """

    def __init__(
        self, items: Sequence[T], *, seed: int, shuffle: bool = True, epochs: int | None = None, fingerprint: str = ""
    ) -> None:
        if not items:
            raise DataError("no rows to draw from")
        if epochs is not None and epochs < 1:
            raise DataError(f"epochs = {epochs}: write 1 or more, or null for an endless stream")
        self.items = items
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self.fingerprint = fingerprint
        self.drawn = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of items in one epoch."""
        return len(self.items)

    def remaining(self) -> int | None:
        """Count the draws left; ``None`` for an endless stream."""
        return None if self.epochs is None else self.epochs * len(self.items) - self.drawn

    def take(self, count: int) -> list[T]:
        """Return the next ``count`` items; fewer, down to none, when fewer remain."""
        if count < 1:
            raise ValueError(f"take({count}): draw at least one item")
        left = self.remaining()
        count = count if left is None else min(count, left)
        taken = [self.items[self._index(self.drawn + i)] for i in range(count)]
        self.drawn += count
        return taken

    def draw(self, number: int) -> T:
        """Return draw ``number`` of the stream, from 0; for any threads, in any order. Those before it count as
        drawn.
        """
        with self._lock:
            item = self.items[self._index(number)]
            self.drawn = max(self.drawn, number + 1)
        return item

    def item_of(self, number: int) -> int:
        """Return which of ``items`` draw ``number`` of the stream is, without drawing it; for any threads."""
        with self._lock:
            return self._index(number)

    def total_steps(self, batch_size: int, steps: int | None = None) -> int:
        """Count the whole batches that a run from the start can make: min(``steps``, epochs × items // ``batch_size``).

        Raises ``DataError`` when nothing bounds it, or when there is not even one batch.
        """
        return whole_batches(len(self.items), self.epochs, batch_size, steps)

    def left_over(self, batch_size: int, steps: int) -> int:
        """Count the draws at the end of a run of ``steps`` that make no whole batch of ``batch_size``."""
        return left_over(len(self.items), self.epochs, batch_size, steps)

    def refill(self, partition: int, ticket: int, attempt: int) -> T:
        """Return the item that replaces a dropped or failed one: depends on the arguments and the seed, moves
        nothing.
        """
        return self.items[derive_seed(self.seed, "refill", partition, ticket, attempt) % len(self.items)]

    def state_dict(self, rewind: int = 0) -> dict[str, int | bool | str]:
        """Return the place in the stream, before the last ``rewind`` draws (those drawn but not trained, so not
        lost).
        """
        if not 0 <= rewind <= self.drawn:
            raise ValueError(f"rewind = {rewind}: only {self.drawn} items were drawn")
        return {"drawn": self.drawn - rewind, **self._identity()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state`` was taken. Raises ``DataError`` if the data or their order are not the same."""
        if "parts" in state:
            raise DataError("the training data are not those of the saved run (a mix): resume with the same data.mix")
        changed = {key: (state[key], value) for key, value in self._identity().items() if state[key] != value}
        if changed:
            differences = "; ".join(f"{key} was {then!r}, is {now!r}" for key, (then, now) in changed.items())
            raise DataError(
                f"the training data are not those of the saved run ({differences}). Resume with the same files, "
                "tokenizer and data options, or start a new run from the saved model"
            )
        drawn = state["drawn"]
        if not isinstance(drawn, int) or drawn < 0:
            raise DataError(f"the saved data position {drawn!r} is no number of draws")
        self.drawn = drawn

    def _identity(self) -> dict[str, int | bool | str]:
        return {
            "items": len(self.items),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def _index(self, draw: int) -> int:
        epoch, position = divmod(draw, len(self.items))
        if not self.shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, _permutation(derive_seed(self.seed, "shuffle", epoch), len(self.items)))
        return int(self._order[1][position])


def whole_batches(items: int, epochs: int | None, batch_size: int, steps: int | None) -> int:
    """Return min(``steps``, ``epochs`` × ``items`` // ``batch_size``), either of which may be None: no bound.

    Raises ``DataError`` when nothing bounds it, or when there is not even one batch.
    """
    if epochs is None:
        if steps is None:
            raise DataError("neither a number of steps nor of epochs: set one of them")
        return steps
    whole = epochs * items // batch_size
    if whole == 0:
        raise DataError(
            f"{items} usable rows × {epochs} epochs give no batch of {batch_size}: "
            "lower the batch size, raise the epochs, or add rows"
        )
    return whole if steps is None else min(steps, whole)


def left_over(items: int, epochs: int | None, batch_size: int, steps: int) -> int:
    """Count the draws of the last epoch that make no whole batch, so that nobody sees them; 0 where ``steps`` end the
    run.
    """
    left = 0 if epochs is None else epochs * items - steps * batch_size
    return left if 0 < left < batch_size else 0


def _permutation(seed: int, size: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(``size``). ``RandomState``, since only its streams are promised never to change."""
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).permutation(size)
