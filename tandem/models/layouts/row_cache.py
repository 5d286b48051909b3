"""What generation asks of a cache, whatever lies in it."""

from __future__ import annotations

from typing import Protocol

import torch

from tandem.models.layouts.attention import Layout


class Placed(Layout, Protocol):
    """A layout that says where its tokens stand in their documents: ``positions`` (T,) int64, on the CPU.
    ``DecodeLayout`` and ``RowsDecode`` are such.
    """

    positions: torch.Tensor


class Prefill(Placed, Protocol):
    """A layout whose forward begins rows. ``last`` int64, on the CPU: the place of the last token of each.
    ``PromptLayout``, ``ResumptionLayout`` and ``RowsPrefill`` are such.
    """

    last: torch.Tensor


class RowCache(Protocol):
    """Rows of samples that grow by a token at a time. Those in use are always the first ``count`` ones. ``KVCache``
    shares prompts, ``RowsCache`` does not.
    """

    device: torch.device

    @property
    def count(self) -> int:
        """The number of rows in use."""

    def append(self, lengths: torch.Tensor, copies: int) -> Prefill:
        """Take ``copies`` new rows for each prompt (P,); the forward of the returned layout fills them.

        That forward is over the prompts one after the other; ``last`` is (P,). ``copies`` must be the same, or at least
        on the same side of 1, for all rows in use.
        """

    def resume(self, lengths: torch.Tensor, copies: torch.Tensor, begun: torch.Tensor) -> Prefill:
        """Take a row for each of R answers that have begun, several to a prompt.

        The forward is over the P prompts of ``lengths`` (P,), then the answers of ``begun`` (R,) tokens, which may be
        0; ``copies`` (P,) answers go on behind each prompt. ``last`` is (R,). All int64 on the CPU.
        """

    def extend(self) -> Placed:
        """Make room for one more token in every row; the forward of the returned layout, over one each, writes it."""

    def move(self, source: torch.Tensor, target: torch.Tensor, count: int) -> None:
        """Overwrite the rows ``target`` by the rows ``source`` (M,), then keep the first ``count`` rows."""
