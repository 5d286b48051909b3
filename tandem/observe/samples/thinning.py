"""Which parts go when there is room for fewer: a pure function of what is there."""

from __future__ import annotations

from collections.abc import Mapping


def thinned(sizes: Mapping[int, int], budget: int) -> list[int]:
    """Choose the steps whose parts go, so that what stays of ``sizes`` (step -> bytes) is at most ``budget`` bytes.

    One after the other, the step that leaves the smallest gap between its neighbours, of several the oldest: so older
    steps are thinned out evenly, newer ones are denser, and the first and the newest stay. Where these two are too
    much, the first goes too; the newest never does.

    >>> thinned({step: 1 for step in range(1, 9)}, 5)
    [2, 4, 6]
    """
    kept, used, gone = sorted(sizes), sum(sizes.values()), []
    while used > budget and len(kept) > 1:
        inner = range(1, len(kept) - 1)
        place = min(inner, key=lambda i: (kept[i + 1] - kept[i - 1], i), default=0)
        used -= sizes[kept[place]]
        gone.append(kept.pop(place))
    return gone
