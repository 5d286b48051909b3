"""What a prefill runs: tokens of prompts and of the answers begun to them, where each stands, and what prompts show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.columns.images import Images
from tandem.columns.ragged import Ragged
from tandem.models.causal_lm import CausalLM
from tandem.models.vision.images import Seen


@dataclass(frozen=True)
class Prompts:
    """The prompts of a prefill, as ``rows``; ``seen`` where one of them shows an image, its tokens then marked."""

    rows: Ragged
    seen: Seen | None

    @classmethod
    def of(cls, model: CausalLM, prompts: Sequence[torch.Tensor], shown: Sequence[Images | None]) -> Prompts:
        """Return ``prompts`` with what each of them shows. Raises ``ContractError`` where image tokens and images don't
        match.
        """
        rows = Ragged.from_rows(prompts)
        seen = model.seeing.see(rows, shown) if any(shown) else None
        return cls(rows if seen is None else seen.prompts, seen)

    @property
    def images(self) -> Images | None:
        """What all of them show together."""
        return None if self.seen is None else self.seen.images

    @property
    def shift(self) -> torch.Tensor:
        """How much further than its place an answer stands behind each, (P,) int64."""
        return torch.zeros(len(self.rows), dtype=torch.int64) if self.seen is None else self.seen.shift

    def placed(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where tokens stand that their layout has at ``positions`` (T,): the prompts one after the other."""
        return positions if self.seen is None else self.seen.positions.values.T

    def before(self, positions: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """Return where the tokens stand of all prompts, then of answers (N,) behind the prompts ``owner`` (N,)."""
        if self.seen is None:
            return positions
        behind = positions[len(self.rows.values) :] + self.seen.shift[owner]
        return torch.cat([self.seen.positions.values.T, behind.expand(3, -1)], 1)

    def joined(self, answers: Sequence[torch.Tensor], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids (T,) of each prompt with its answer, one after the other, and where they stand."""
        ids = torch.cat([part for pair in zip(self.rows, answers, strict=True) for part in pair])
        if self.seen is None:
            return ids, positions
        places = []
        for axes, answer, shift in zip(self.seen.positions, answers, self.seen.shift, strict=True):
            behind = torch.arange(len(axes), len(axes) + len(answer)) + shift
            places += [axes.T, behind.expand(3, -1)]
        return ids, torch.cat(places, 1)
