"""Weights are cast once for all tokens of a version, those below adapters too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.models.loading import as_causal_lm
from tandem.models.lora import get_lora_model
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import Sampling
from tests.rollout.tiny_models import bits, llama, requests


class Casts(TorchDispatchMode):
    """Counts what is cast from float32 to bfloat16, by memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and given.get("dtype") == torch.bfloat16:
            self.made[args[0].data_ptr()] += 1
        return func(*args, **given)


def model(rank: int) -> Any:
    return as_causal_lm(get_lora_model(llama(), rank, target_modules=["q_proj", "down_proj"]), dtype="bfloat16")


@pytest.mark.parametrize(("rank", "shares"), [(0, False), (4, False), (4, True)])
def test_weights_are_cast_once_a_version(rank: int, shares: bool) -> None:
    """With adapters of the trainer's own, these are cast again with each group that ends; they may be trained."""
    own = model(rank)
    engine = HfEngine(own, shares_weights=shares, max_num_seqs=4)
    weights = {p.data_ptr(): p for p in own.model.parameters() if p.dim() > 1}
    asked, sampling = requests(5), Sampling(n=2, max_tokens=9)
    with Casts() as casts:
        list(engine.generate(asked, sampling))
    again = {at: count for at, count in casts.made.items() if at in weights and count > 1}
    assert all(weights[at].requires_grad for at in again) if shares else not again
    assert sum(at in weights for at in casts.made) >= 15  # seven of each layer, and the head


def test_new_weights_are_cast_anew() -> None:
    asked, sampling = requests(4), Sampling(n=2, max_tokens=9)
    engine = HfEngine(model(0))
    list(engine.generate(asked, sampling))
    other = as_causal_lm(llama(1), dtype="bfloat16")
    engine.load(llama(1).state_dict().items(), 1)
    assert bits(list(engine.generate(asked, sampling))) == bits(list(HfEngine(other).generate(asked, sampling)))
