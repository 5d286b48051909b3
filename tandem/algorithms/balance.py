"""Dealing sequences to ranks and micro-batches by their lengths. Pure; deterministic in its input.

``partition`` splits into a fixed number of bins of nearly equal sums; ``micro_batches`` into as few bins as a token
budget allows. No bin is ever empty.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tandem.base.errors import ContractError

Bins = list[list[int]]
"""Indices per bin, ascending within a bin."""

EXACT_WORK = 100_000
"""Items x bins up to which differencing and exhaustive exchange run; beyond, greedy is close to even anyway."""


def partition(lengths: Sequence[int], bins: int, *, equal_size: bool = False) -> Bins:
    """Split ``lengths`` into ``bins`` non-empty bins with sums as even as found; with ``equal_size`` of equal counts.

    The best of Karmarkar-Karp differencing (1982) and longest-first greedy, improved by moves and exchanges between
    pairs of bins until none helps. Large inputs take the greedy way alone.

    Raises ``ContractError`` for fewer items than bins, or a count that does not divide where ``equal_size`` is asked.

    >>> partition([8, 7, 6, 5, 4], bins=2)
    [[2, 3, 4], [0, 1]]
    """
    if bins < 1 or len(lengths) < bins:
        raise ContractError(f"{len(lengths)} sequences for {bins} bins: give at least one sequence to each bin")
    if equal_size and len(lengths) % bins:
        raise ContractError(
            f"{len(lengths)} sequences do not divide into {bins} bins of equal size: pad, or allow unequal sizes"
        )
    sizes = np.asarray(lengths, dtype=np.int64)
    candidates = [_greedy(sizes, bins, equal_size)]
    if bins > 1 and len(sizes) * bins <= EXACT_WORK:
        candidates += [_differencing(sizes, bins, equal_size, tie) for tie in TIES]
        candidates = [_exchange(sizes, candidate, equal_size) for candidate in candidates]
    best = min(candidates, key=lambda candidate: spread(lengths, candidate))
    return [sorted(bin_) for bin_ in best]


def partition_groups(lengths: Sequence[int], group_ids: Sequence[Hashable], bins: int) -> Bins:
    """Split like ``partition`` with ``equal_size``, but whole groups stay together and each bin has as many groups.

    >>> partition_groups([5, 6, 1, 2, 30, 3, 4, 4], list("aabbccdd"), bins=2)
    [[2, 3, 4, 5], [0, 1, 6, 7]]
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    groups = list(members.values())
    bins_of = partition([sum(lengths[i] for i in group) for group in groups], bins, equal_size=True)
    return [sorted(itertools.chain.from_iterable(groups[g] for g in bin_)) for bin_ in bins_of]


def micro_batches(lengths: Sequence[int], max_tokens: int, *, min_count: int = 1) -> Bins:
    """Split into at least ``min_count`` non-empty bins, none with a sum above ``max_tokens``, as few as found.

    Ranks agree on a count by taking the maximum over ranks of their own and passing it as ``min_count``.

    Raises ``ContractError`` for a sequence longer than the budget (naming it) and for fewer sequences than
    ``min_count``.

    >>> micro_batches([6, 6, 5, 5, 4], max_tokens=12, min_count=2)
    [[0, 4], [1], [2, 3]]
    """
    if not lengths:
        raise ContractError("no sequences to make micro-batches of: fill with a sequence of zero weight")
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if max_tokens < 1 or lengths[longest] > max_tokens:
        raise ContractError(
            f"sequence {longest} has {lengths[longest]} tokens and a micro-batch holds {max_tokens}: "
            "raise the token budget, or shorten prompts and responses"
        )
    packed = _best_fit(lengths, max_tokens)
    fewest = max(min_count, -(-sum(lengths) // max_tokens))
    most = max(fewest, len(packed))
    step = max(1, (most - fewest) // 8)
    for count in [*range(fewest, most, step), most]:
        even = partition(lengths, count)
        if max(_sums(lengths, even)) <= max_tokens:
            return even
    return [sorted(bin_) for bin_ in _split(packed, most)]


def reverse_index(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes ``order``: ``[x[i] for i in order]`` taken at its result gives ``x`` again."""
    inverse = [0] * len(order)
    for position, index in enumerate(order):
        inverse[index] = position
    return inverse


def spread(lengths: Sequence[int], bins: Bins) -> int:
    """Return the largest minus the smallest sum of the bins, in tokens."""
    sums = _sums(lengths, bins)
    return max(sums) - min(sums)


def _sums(lengths: Sequence[int], bins: Bins) -> list[int]:
    return [sum(int(lengths[i]) for i in bin_) for bin_ in bins]


def _greedy(sizes: np.ndarray, bins: int, equal_size: bool) -> Bins:
    """Put the longest first, each into the bin with the smallest sum (of those with room, for bins of equal size)."""
    room = len(sizes) // bins if equal_size else len(sizes)
    result: Bins = [[] for _ in range(bins)]
    open_bins = [(0, 0, b) for b in range(bins)]
    for index in np.argsort(-sizes, kind="stable").tolist():
        total, held, b = heapq.heappop(open_bins)
        result[b].append(index)
        if held + 1 < room:
            heapq.heappush(open_bins, (total + int(sizes[index]), held + 1, b))
    return result


Pile = tuple[int, int, Any]
"""Sum, count, and the items as a nested pair: joining two piles is then O(1)."""


TIES: tuple[tuple[int, int], ...] = ((0, 1), (0, -1), (-1, 1), (1, 1))
"""Which of two partial partitions of equal spread comes first: by largest sum, then by age, with these signs.

No order is best for all inputs, so all are tried."""


def _differencing(sizes: np.ndarray, bins: int, equal_size: bool, tie: tuple[int, int]) -> Bins:
    """Lay the two partial partitions of widest spread on each other (Karmarkar-Karp), largest pile on smallest.

    This goes on until one is left. For bins of equal size the start is partitions of ``bins`` neighbours by length.
    """
    empty: Pile = (0, 0, None)
    order = np.argsort(sizes, kind="stable").tolist()
    step = bins if equal_size else 1
    serial = itertools.count()
    heap: list[tuple[int, int, int, list[Pile]]] = []

    def ranked(piles: list[Pile]) -> tuple[int, int, int, list[Pile]]:
        return (piles[-1][0] - piles[0][0], tie[0] * piles[0][0], tie[1] * next(serial), piles)

    for start in range(0, len(order), step):
        piles: list[Pile] = [(int(sizes[i]), 1, i) for i in reversed(order[start : start + step])]
        piles += [empty] * (bins - len(piles))
        heap.append(ranked(piles))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        joined = [_join(a, b) for a, b in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda pile: pile[:2], reverse=True)
        heapq.heappush(heap, ranked(joined))
    return _without_empty(sizes, [_items(pile) for pile in heap[0][-1]])


def _join(a: Pile, b: Pile) -> Pile:
    if not a[1] or not b[1]:
        return a if a[1] else b
    return (a[0] + b[0], a[1] + b[1], (a[2], b[2]))


def _items(pile: Pile) -> list[int]:
    found, pending = [], [pile[2]]
    while pending:
        node = pending.pop()
        if isinstance(node, tuple):
            pending.extend(node)
        elif node is not None:
            found.append(node)
    return found


def _without_empty(sizes: np.ndarray, bins: Bins) -> Bins:
    """Give each empty bin the smallest sequence of the fullest one."""
    for bin_ in bins:
        if not bin_:
            donor = max(bins, key=len)
            smallest = min(donor, key=lambda i: int(sizes[i]))
            donor.remove(smallest)
            bin_.append(smallest)
    return bins


def _exchange(sizes: np.ndarray, bins: Bins, equal_size: bool) -> Bins:
    """Move or swap sequences between two bins as long as that brings their sums closer.

    Both new sums lie strictly between the old ones, so the spread never grows and the loop ends.
    """
    bins = [list(bin_) for bin_ in bins]
    sums = _sums(sizes.tolist(), bins)
    while True:
        rank = sorted(range(len(bins)), key=sums.__getitem__)
        pairs = ((high, low) for high in reversed(rank) for low in rank if sums[high] > sums[low] + 1)
        for high, low in pairs:
            trade = _best_trade(sizes, bins[high], bins[low], sums[high] - sums[low], equal_size)
            if trade is not None:
                break
        else:
            return bins
        give, take = trade
        bins[high].remove(give)
        bins[low].append(give)
        gain = int(sizes[give])
        if take is not None:
            bins[low].remove(take)
            bins[high].append(take)
            gain -= int(sizes[take])
        sums[high] -= gain
        sums[low] += gain


def _best_trade(
    sizes: np.ndarray, high: list[int], low: list[int], gap: int, equal_size: bool
) -> tuple[int, int | None] | None:
    """Return what ``high`` gives and takes so that its sum falls by as near to half the ``gap`` as possible, if at
    all.
    """
    may_move = not equal_size and len(high) > 1
    takes: list[int | None] = [*sorted(low, key=lambda i: int(sizes[i]))]
    weights = np.array([int(sizes[i]) for i in takes if i is not None], dtype=np.int64)
    if may_move:
        takes, weights = [None, *takes], np.concatenate([np.zeros(1, np.int64), weights])
    gives = sizes[high]
    at = np.searchsorted(weights, gives - gap / 2)
    best: tuple[float, int, int] | None = None
    for column in (np.clip(at - 1, 0, None), np.clip(at, None, len(weights) - 1)):
        gain = gives - weights[column]
        miss = np.where((gain > 0) & (gain < gap), np.abs(gain - gap / 2), np.inf)
        row = int(miss.argmin())
        if np.isfinite(miss[row]) and (best is None or miss[row] < best[0]):
            best = (float(miss[row]), high[row], int(column[row]))
    return None if best is None else (best[1], takes[best[2]])


def _best_fit(lengths: Sequence[int], max_tokens: int) -> Bins:
    """Put the longest first, each into the fullest bin that still holds it; a new bin where none does."""
    result: Bins = []
    room: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        slot = bisect.bisect_left(room, (lengths[index], -1))
        if slot == len(room):
            result.append([])
            left, b = max_tokens, len(result) - 1
        else:
            left, b = room.pop(slot)
        result[b].append(index)
        bisect.insort(room, (left - lengths[index], b))
    return result


def _split(bins: Bins, count: int) -> Bins:
    """Cut the fullest bins in two until there are ``count``."""
    bins = [list(bin_) for bin_ in bins]
    while len(bins) < count:
        fullest = max(bins, key=len)
        half = len(fullest) // 2
        bins.append(fullest[half:])
        del fullest[half:]
    return bins
