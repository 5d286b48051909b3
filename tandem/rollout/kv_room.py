"""How much memory keys and values of an engine may take, and whether there is some left. Needs no model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tandem.base.errors import ContractError
from tandem.models.kv_cost import KVCost, Rows

KEY = "actor_rollout_ref.rollout.kv_cache_gib"


class KVRoom:
    """The memory of all generations of an engine: what is let in fits at its longest.

    ``bound``: bytes; None: any number. ``why`` says where that comes from. ``apart``: each group has tables of its own.
    """

    def __init__(self, cost: KVCost, bound: int | None, why: str, *, apart: bool) -> None:
        self.cost, self.bound, self._why, self._apart = cost, bound, why, apart
        self._held: dict[Hashable, int] = {}

    @property
    def slots(self) -> int | None:
        """Tokens that tables may have room for."""
        return None if self.bound is None else self.bound // max(1, self.cost.slot)

    @property
    def used(self) -> bool:
        """Whether a generation is at work."""
        return bool(self._held)

    def hold(self, who: Hashable, groups: Sequence[Rows]) -> None:
        """Note the groups that ``who``, a generation, has in flight."""
        self._held[who] = self._need(groups)

    def release(self, who: Hashable) -> None:
        """Forget a generation that has ended."""
        self._held.pop(who, None)

    def fits(self, who: Hashable, flying: Sequence[Rows], more: Sequence[Rows]) -> bool:
        """Say whether ``who`` can begin ``more`` beside what it has ``flying`` and what others have."""
        if self.bound is None:
            return True
        others = sum(held for other, held in self._held.items() if other is not who)
        return self._need([*flying, *more]) + others <= self.bound

    def check(self, key: int | str, group: Rows) -> None:
        """Raise ``ContractError`` for a prompt ``key`` whose ``group`` doesn't fit when it is alone."""
        need = self._need([group])
        if self.bound is None or need <= self.bound:
            return
        raise ContractError(
            f"prompt {key!r}: keys and values of {group.prompt} prompt tokens and {group.rows} x {group.answer} answer "
            f"tokens take {need} bytes ({self.cost.token} a token), and there are {self.bound} for them, {self._why}: "
            f"lower max_response_length or n, or raise {KEY}"
        )

    def _need(self, groups: Sequence[Rows]) -> int:
        return self.cost.apart(groups) if self._apart else self.cost.together(groups)
