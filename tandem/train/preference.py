"""What is minimised in preference training: the sum of a loss's terms, divided by their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tandem.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from tandem.base.registry import Entry
from tandem.columns.proto import DataProto
from tandem.train.objective import COMPUTED, LossSum


@dataclass(frozen=True)
class PreferenceObjective:
    """The mean over pairs, or over answers, of the registered loss ``name`` with its YAML ``parameters``."""

    name: str = "dpo"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    wants_entropy: bool = False
    needs_entropy: bool = False

    @property
    def entry(self) -> Entry[Callable[..., PreferenceLoss]]:
        """The registered preference loss with its declared facts."""
        return PREFERENCE_LOSSES[self.name]

    @property
    def paired(self) -> bool:
        """Whether a term is of a pair, not of an answer."""
        return "group_ids" in self.entry.signature.columns

    @property
    def router_coef(self) -> float:
        """0: it has no such term."""
        return 0.0

    @property
    def whole_groups(self) -> bool:
        """A pair stays together; answers that are judged alone need not."""
        return self.paired

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the loss reads, without those computed on the way."""
        return tuple(name for name in self.entry.signature.columns if name not in COMPUTED)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The columns that the loss can do without."""
        return self.entry.signature.optional_columns

    def numerator(
        self, columns: Mapping[str, torch.Tensor], logprobs: torch.Tensor, entropies: torch.Tensor | None
    ) -> LossSum:
        """Return the terms of the preference loss over the pairs or answers, summed."""
        del entropies
        given = {**columns, "logprobs": logprobs}
        signature = self.entry.signature
        names = (*signature.columns, *(name for name in signature.optional_columns if name in given))
        loss = self.entry.target(**{name: given[name] for name in names}, **self.parameters)
        return LossSum(loss.terms.sum(), dict(loss.metrics))

    def denominator(self, batch: DataProto) -> float:
        """Count the pairs, or answers, of the mini-batch."""
        return float(len(batch.dense("group_ids").unique()) if self.paired else len(batch))
