"""A transformers causal LM as Tandem runs it: tokens in one row, attention by layout, the head on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tandem.base.errors import ContractError
from tandem.models.attention import AttentionLayout

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Head:
    """The output projection: ``weight`` (V, d), ``bias`` (V,), and what the architecture does to logits.

    They are multiplied by ``scale``, then squashed into (-softcap, softcap).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The head of ``model``, sharing its weights."""
        projection, config = model.get_output_embeddings(), model.config
        # Absent attributes mean that the architecture has no such transform, not a default of ours.
        divisor: float | None = getattr(config, "logits_scaling", None)
        factor: float | None = getattr(config, "logit_scale", None)
        return cls(
            weight=projection.weight,
            bias=getattr(projection, "bias", None),
            scale=(1.0 if factor is None else factor) / (1.0 if divisor is None else divisor),
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (N, d) -> logits (N, V), in the weight's dtype."""
        logits = _project(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """hidden (N, d), weight (V, d) -> (N, V).

    A CPU without gradients goes through oneDNN: for few rows and a large V it takes 0.4 to 0.8 of the default's time.
    """
    plain = hidden.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if plain and hidden.device.type == "cpu" and not torch.is_grad_enabled() and torch.backends.mkldnn.is_available():
        return nn.functional.linear(hidden.to_mkldnn(), weight, bias).to_dense()
    return nn.functional.linear(hidden, weight, bias)


class CausalLM(nn.Module):
    """Wraps a HF model so that *all* parameters, head included, are used inside one ``forward``.

    That is what sharding needs (parameters are gathered around a forward) and what lets training and generation share
    one set of weights: they differ only in the layout and in what they ``read`` off the hidden states.
    """

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype

    def computing(self) -> torch.autocast:
        """The context in which matrix products run in ``compute_dtype``; weights stay as they are.

        ``forward`` enters it itself. Many forwards with the same weights should share one outer context: cast weights
        are kept for as long as it lasts.
        """
        device = self.model.device.type
        return torch.autocast(device, dtype=self.compute_dtype, enabled=self.compute_dtype == torch.bfloat16)

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer layers, whatever the architecture calls them."""
        count = self.model.config.num_hidden_layers
        for module in self.model.get_decoder().modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise ContractError(f"{type(self.model).__name__} has no list of {count} layers: choose another architecture")

    @property
    def head(self) -> Head:
        """What is read off the hidden states."""
        return Head.of(self.model)

    def checkpoint_gradients(self) -> None:
        """Keep only the inputs of each layer for the backward, and compute its activations again there."""
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: AttentionLayout,
        read: Callable[[torch.Tensor, Head], R],
    ) -> R:
        """``input_ids`` and ``positions`` (T,) int64; returns ``read(hidden (T, d), head)``."""
        decoder = self.model.get_decoder()
        with self.computing():
            output = decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, layout=layout)
            return read(output.last_hidden_state[0], self.head)
