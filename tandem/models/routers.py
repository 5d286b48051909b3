"""The routers of a mixture of experts: what they chose in a forward, and a forward with choices made before.

A router gives each token ``k`` of ``E`` experts, and a weight to each. Between two computations of the same token, such
as generation and training, logits differ by rounding, and near a tie that is enough for another expert: a difference of
probabilities that is not small. So a forward may be *given* the experts: it takes its own probabilities at them, which
have a gradient, and weighs them as the family does (routing replay: Zheng et al., arXiv 2507.18071, section 5.3; of
the routes of the engine that sampled: Ma et al., arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.base.errors import ContractError
from tandem.models.families import ROUTED, Weighing

NO_ROUTE = 255
"""Each byte of a token's record where there is none."""

_ONE_BYTE = 255
"""Most experts whose numbers are written in one byte; more take two."""


def encoded(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return the choices (T, L, k) int64 among ``count`` experts as bytes (T, L · k · b) uint8; -1 is no record.

    ``b`` is 1 for up to 255 experts, else 2.
    """
    if count <= _ONE_BYTE:
        return experts.to(torch.uint8).flatten(1)
    return experts.to(torch.int16).contiguous().view(torch.uint8).flatten(1)


def decoded(routes: torch.Tensor, layers: int, count: int) -> torch.Tensor:
    """Return the choices (T, layers, k) int64 that ``encoded`` was given."""
    if count <= _ONE_BYTE:
        found = routes.long()
        found = torch.where(found == NO_ROUTE, -1, found)
    else:
        found = routes.contiguous().view(torch.int16).long()
    return found.reshape(len(found), layers, -1)


def filled(routes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the records ``routes`` (T, w), those of ``others`` (T, w) where there is none."""
    return torch.where((routes == NO_ROUTE).all(-1, keepdim=True), others, routes)


@dataclass(frozen=True)
class Choice:
    """What one router did with T tokens: its ``logits`` (T, E), with gradient where there is one, and the ``experts``
    (T, k) int64 that the tokens went to.

    Where experts were given: ``otherwise`` (T,), how many of a token's it would not have chosen, and ``given`` (T,)
    bool, whether the token had a record.
    """

    logits: torch.Tensor
    experts: torch.Tensor
    otherwise: torch.Tensor | None = None
    given: torch.Tensor | None = None


class Routers:
    """The routers of a model, in the order of its layers: L of them, each with E ``experts``, of which a token gets
    ``chosen``.

    ``begin`` says what the next forward is to do; it holds until the next one, so that a backward that computes layers
    again finds the same. ``take`` gives what the forward did, once.
    """

    def __init__(self, routers: Sequence[nn.Module], weighing: Weighing) -> None:
        first: Any = routers[0]
        self.layers, self.experts, self.chosen = len(routers), int(first.num_experts), int(first.top_k)
        self.weighing = weighing
        self._given: torch.Tensor | None = None
        self._watched = False
        self._seen: dict[int, Choice] = {}
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._routed, layer))

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers | None:
        """Return the routers of ``model``; None where it has none, or its family is not in ``ROUTED``."""
        weighing = ROUTED.get(str(model.config.get_text_config().model_type))
        found = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        return None if weighing is None or not found else cls(found, weighing)

    @property
    def width(self) -> int:
        """Bytes of the record of a token."""
        return self.layers * self.chosen * (1 if self.experts <= _ONE_BYTE else 2)

    def begin(self, routes: torch.Tensor | None, watched: bool) -> None:
        """Let the next forward take the choices in ``routes`` (T, width) uint8, where it has them, and note its own
        where it is ``watched``.
        """
        if routes is not None and routes.shape[1:] != (self.width,):
            raise ContractError(
                f"routes have {tuple(routes.shape[1:])} bytes a token, and {self.layers} routers that choose "
                f"{self.chosen} of {self.experts} experts make {self.width}: they are of another model"
            )
        self._given = None if routes is None else decoded(routes, self.layers, self.experts)
        self._watched, self._seen = watched, {}

    def take(self) -> list[Choice]:
        """Return what the routers did in the forward since ``begin``, by layer, and forget it."""
        seen, self._seen, self._watched = self._seen, {}, False
        return [seen[layer] for layer in sorted(seen)]

    def take_routes(self) -> torch.Tensor:
        """Return the choices of the forward since ``begin``, (T, width) uint8, on the device."""
        return encoded(torch.stack([choice.experts for choice in self.take()], 1), self.experts)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return how likely each expert is, (T, E), adding up to 1 for each token; at least float32."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if self.weighing != "sigmoid":
            return wide.softmax(-1)
        scores = wide.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def _routed(self, layer: int, router: nn.Module, inputs: Any, output: Any) -> Any:
        """Replace what a router gives, (logits, weights, experts), where experts are given."""
        del inputs
        logits, weights, experts = output
        otherwise = known = None
        if self._given is not None:
            if len(self._given) != len(experts):
                raise ContractError(
                    f"a router got {len(experts)} tokens, and {len(self._given)} have routes: they are replayed in "
                    "models that run packed rows only"
                )
            asked = self._given[:, layer]
            known = asked[:, 0] >= 0
            own, experts = experts, torch.where(known[:, None], asked, experts)
            weights = _weights(router, self.weighing, logits, experts).to(weights.dtype)
            otherwise = experts.shape[1] - (experts[:, :, None] == own[:, None]).any(-1).sum(-1)
        if self._watched:
            self._seen[layer] = Choice(logits, experts, otherwise, known)
        return logits, weights, experts


def _weights(router: Any, weighing: Weighing, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the weights (T, k) of ``experts`` as a router of the family computes those of its own choice."""
    if weighing == "chosen":
        return logits.gather(1, experts).softmax(-1)
    if weighing == "sigmoid":
        found = logits.sigmoid().gather(1, experts)
        if router.norm_topk_prob:
            found = found / (found.sum(-1, keepdim=True) + 1e-20)
        return found * float(router.routed_scaling_factor)
    found = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    if weighing == "scaled":
        return found * float(router.routed_scaling_factor)
    if weighing == "renormalised" or router.norm_topk_prob:
        found = found / found.sum(-1, keepdim=True)
    return found
