"""Which ids are tokens: a model may embed more than its tokenizer knows. Importing this costs no torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenIds:
    """The ids that a tokenizer has: those from 0 to ``count - 1`` but for the ``holes``, which rise."""

    count: int
    holes: tuple[int, ...] = ()

    @classmethod
    def among(cls, ids: Iterable[int]) -> TokenIds:
        """Return the token ids among ``ids``, in any order."""
        known = set(ids)
        count = max(known, default=-1) + 1
        return cls(count, () if len(known) == count else tuple(i for i in range(count) if i not in known))

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenIds:
        """Return the token ids of ``tokenizer``, those of added tokens included."""
        return _of(tokenizer, len(tokenizer))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TokenIds:
        """Return what ``dataclasses.asdict`` and JSON made of one."""
        return cls(fields["count"], tuple(fields["holes"]))

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and 0 <= token < self.count and token not in self._missing

    def __str__(self) -> str:
        return f"0 to {self.count - 1}" + (f" without {len(self.holes)} of them" if self.holes else "")

    @functools.cached_property
    def _missing(self) -> frozenset[int]:
        return frozenset(self.holes)


@functools.lru_cache(maxsize=8)
def _of(tokenizer: PreTrainedTokenizerBase, tokens: int) -> TokenIds:
    """Collect the ids; ``tokens`` is a key of the cache, since a tokenizer that got some more is another one."""
    del tokens
    return TokenIds.among(tokenizer.get_vocab().values())
