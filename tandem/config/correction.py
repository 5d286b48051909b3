"""What is done about the gap between the policy that sampled and the one at the start of a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from tandem.config.node import Node

Statistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
    "seq_min_k1",
]
"""What a rejection looks at, of r = old / rollout: k1 is r itself (of a sequence: exp of the sum or mean of its
log-ratios), k2 = (log r)^2 / 2, k3 = r - 1 - log r."""


class RejectionConfig(Node):
    """Tokens (``token_*``) or whole answers (``seq_*``) that drifted too far are left out of the loss."""

    by: Statistic
    """What is looked at; seq_mean_k1 is the geometric mean of an answer's ratios."""
    high: PositiveFloat | None = None
    """What is above is left out. Bounds are on old / rollout: a band [low, high] on rollout / old, as verl's, is
    [1 / high, 1 / low] here."""
    low: PositiveFloat | None = None
    """What is below is left out; of k1 only. Default: 1 / high."""
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Instead of bounds: the part of the partition that is kept, the least drifted first."""


class RolloutCorrectionConfig(Node):
    """Importance weights old / rollout, and rejection of what they could not repair."""

    weights: Literal["off", "token", "sequence"] = "off"
    """A weight for each token, or for each answer the product over its tokens."""
    cap: PositiveFloat = 2.0
    """Weights are truncated here."""
    floor: NonNegativeFloat | None = None
    """With it, weights outside [floor, cap] are 0 instead of truncated."""
    normalize: bool = False
    """Divide the weights by their mean over the partition."""
    reject: list[RejectionConfig] = []
    """What is left out of the loss; it stays in the statistics of its group."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """An answer with a token whose ratio old / rollout is below this is left out, such as 1.0e-4."""

    @property
    def gives(self) -> tuple[str, ...]:
        """The columns that follow: none where nothing is asked for."""
        weights = ("tis_weights",) if self.weights != "off" else ()
        return (*weights, *(("loss_mask",) if self.reject or self.veto is not None else ()))
