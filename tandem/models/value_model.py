"""A transformers model with one number per token: what the critic trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tandem.base.errors import DataError
from tandem.base.lazy import LazyModule
from tandem.config.model import ModelConfig
from tandem.models.causal_lm import CausalLM
from tandem.models.head.projection import Head
from tandem.models.loading import below_another_head, from_pretrained, prepared
from tandem.models.lora import hold_base, modules_to_adapt

if TYPE_CHECKING:
    import peft
else:
    peft = LazyModule("peft")


class ValueModel(CausalLM):
    """Runs as a ``CausalLM`` does; its head is a projection to one number: weight (1, d), bias (1,)."""

    @property
    def head(self) -> Head:
        """The projection of a hidden state to one number."""
        projection = _projection(self.model)
        return Head(projection.weight, projection.bias)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the whole model gives for hidden states (N, d): values (N, 1)."""
        return token_values(hidden, self.head)[:, None]


def load_value_model(model: ModelConfig) -> ValueModel:
    """Return the model in ``model.path`` (folder or hub id) with a value head, and adapters where ``model`` asks for
    them.

    A new head is zero: all values are 0 until something is learned, and nothing about it is random. A folder that
    brings a head with one output (a saved critic, a reward model) keeps it. Raises ``DataError`` where there is no
    model, or one of an architecture that transformers can't give such a head.
    """
    with _quietly():
        plain = from_pretrained(
            model.path,
            model.trust_remote_code,
            auto=AutoModelForTokenClassification,
            complete=_zero_head,
            spare=below_another_head,
            num_labels=1,
        )
    if model.lora_rank:
        _adapt(plain, model)
    return ValueModel(prepared(plain), getattr(torch, model.dtype))


def token_values(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Turn hidden (N, d) into values (N,), in float32 (float64 for float64 weights) whatever the forward
    computes in.
    """
    assert head.bias is not None
    with torch.autocast(hidden.device.type, enabled=False):
        return (hidden.to(head.weight.dtype) * head.weight[0]).sum(-1) + head.bias


def _projection(model: PreTrainedModel) -> nn.Linear:
    """Return the linear layer on top, whatever the architecture calls it."""
    found = [child for child in model.children() if isinstance(child, nn.Linear) and child.out_features == 1]
    if len(found) != 1 or found[0].bias is None:
        raise DataError(
            f"{type(model).__name__} has no linear layer on top that gives one number a token, so it can't be a "
            "critic: name another model in critic.model.path"
        )
    return found[0]


def _zero_head(model: PreTrainedModel, missing: set[str]) -> set[str]:
    own = {id(parameter) for parameter in _projection(model).parameters()}
    fresh = {name: p for name, p in model.named_parameters() if id(p) in own and name in missing}
    for parameter in fresh.values():
        nn.init.zeros_(parameter)
    return missing - fresh.keys()


def _adapt(plain: PreTrainedModel, model: ModelConfig) -> None:
    """Put adapters into ``plain``: they and the value head are what is trained. Their random half is always the
    same.
    """
    head = _projection(plain)
    config = peft.LoraConfig(
        task_type=peft.TaskType.TOKEN_CLS,
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,  # type: ignore[arg-type]  # a float is fine: it is only divided
        target_modules=modules_to_adapt(plain, model.lora_target_modules, head),
        exclude_modules=[name for name, module in plain.named_modules() if module is head],
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, plain)
    head.requires_grad_(True)
    hold_base(plain, model.lora_base_dtype)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers from reporting a head that it makes, and the global stream from the numbers that it takes for
    it.
    """
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        transformers_logging.set_verbosity(before)
