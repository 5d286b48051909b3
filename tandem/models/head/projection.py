"""From hidden states to logits: the output projection, and what an architecture does beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.base.errors import DataError
from tandem.models.head.vocabulary import SplitVocabulary

_STEEP, _FLAT = 2.0**-12, 2.0**30  # logits at which a softcap does nothing, and all it can
_NEVER = -1e9  # the logit of an id that is no token: probability 0 in every dtype, and finite, as gradients need it


@dataclass(frozen=True)
class Transform:
    """What happens to the product of hidden states and projection: times ``scale``, then into (-softcap, softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the model's logits from plain ones of any shape."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


PLAIN = Transform()


@dataclass(frozen=True, eq=False)
class Head:
    """The output projection: ``weight`` (E, d), ``bias`` (E,), and what the architecture does to logits.

    Of its E rows the first ``size`` = V are tokens; None: all. ``holes`` (H,) int64: ids below V that are none. With
    ``split`` only some rows are here: log-probs of ``tandem.models.head.logprobs`` are all that is read off it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    transform: Transform = PLAIN
    count: int | None = None
    holes: torch.Tensor | None = None
    split: SplitVocabulary | None = None

    @property
    def size(self) -> int:
        """V, the number of logits."""
        return len(self.weight) if self.count is None else self.count

    def rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight (V, d) and bias (V,) of the tokens, sharing memory with all; of a split head all that is
        here.
        """
        if self.split is not None or self.size == len(self.weight):
            return self.weight, self.bias
        return self.weight[: self.size], None if self.bias is None else self.bias[: self.size]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn hidden (N, d) into logits (N, V), in the weight's dtype."""
        if torch.is_autocast_enabled(hidden.device.type):  # it keeps the cast of a whole weight, not that of a part
            plain = _project(hidden, self.weight, self.bias)[:, : self.size]
        else:
            plain = _project(hidden, *self.rows())
        return without(self.transform(plain), self.holes)


def without(logits: torch.Tensor, holes: torch.Tensor | None) -> torch.Tensor:
    """Return ``logits`` (N, V) of a distribution that has nothing at the ids ``holes`` (H,)."""
    return logits if holes is None else logits.index_fill(-1, holes, _NEVER)


@torch.no_grad()
def measured_transform(model: PreTrainedModel, decoder: nn.Module) -> Transform:
    """Return what ``model`` does between its ``decoder`` and its logits, beside the projection, found by feeding it
    numbers.

    Names in a config don't say it: one family divides by a factor that another multiplies with. Raises ``DataError``
    where it is something else than a factor and a softcap.
    """
    family, device = model.config.model_type, model.device
    projection = model.get_output_embeddings()
    if not isinstance(projection, nn.Linear):
        raise DataError(f"the model family {family!r} has no linear head over its tokens: choose another model")
    size, found = projection.out_features, {}
    plain = torch.linspace(-30.0, 30.0, size, device=device, dtype=projection.weight.dtype)
    plain[0], plain[-1] = _STEEP, _FLAT

    def on_decoder(module: nn.Module, args: Any, output: Any) -> None:
        found["hidden"] = output.last_hidden_state

    def on_projection(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        found["projected"] = args[0]
        return plain.expand_as(output)

    hooks = [decoder.register_forward_hook(on_decoder), projection.register_forward_hook(on_projection)]
    try:
        logits = model(input_ids=torch.tensor([[size // 2]], device=device), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    before = _factor(found.get("hidden"), found.get("projected"))
    after = _fitted(plain, logits.flatten()) if logits.numel() == size else None
    if before is None or after is None:
        raise DataError(
            f"the model family {family!r} does more between its hidden states and its logits than a factor and a "
            "softcap: choose another model"
        )
    return Transform(before * after.scale, after.softcap)


def _fitted(plain: torch.Tensor, logits: torch.Tensor) -> Transform | None:
    """Return the transform that makes ``logits`` (V,) of ``plain`` (V,); None where there is none."""
    scale, highest = float(logits[0] / plain[0]), float(logits[-1])
    fitted = Transform(scale, None if highest > 0.5 * scale * float(plain[-1]) else highest)
    same = torch.allclose(fitted(plain), logits.to(plain.dtype), rtol=1e-5, atol=1e-6)
    return fitted if same and scale > 0 else None


def _factor(hidden: torch.Tensor | None, projected: torch.Tensor | None) -> float | None:
    """Return the number by which the decoder's ``hidden`` is multiplied on its way to the head; None where it is no
    number.
    """
    if hidden is None or projected is None or hidden.numel() != projected.numel():
        return None
    before, after = hidden.flatten().double(), projected.flatten().double()
    if not bool(before.any()):
        return None
    factor = 1.0 if torch.equal(before, after) else float(before @ after / (before @ before))
    return factor if torch.allclose(after, before * factor, rtol=1e-4, atol=1e-7) else None


def _project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Project hidden (N, d) by weight (V, d) to (N, V).

    A CPU without gradients goes through oneDNN: for few rows and a large V it takes 0.4 to 0.8 of the default's time.
    """
    plain = hidden.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if plain and hidden.device.type == "cpu" and not torch.is_grad_enabled() and torch.backends.mkldnn.is_available():
        return nn.functional.linear(hidden.to_mkldnn(), weight, bias).to_dense()
    return nn.functional.linear(hidden, weight, bias)
