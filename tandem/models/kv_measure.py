"""What keys and values of a model cost, measured: a few tokens are run, and what is kept of them is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from tandem.models.causal_lm import CausalLM
from tandem.models.head.projection import Head
from tandem.models.kv_cost import KVCost
from tandem.models.layouts.cache import KVCache
from tandem.models.layouts.rows import RowsCache
from tandem.models.prefill import Prompts

_SHORT, _LONG = 2, 4  # tokens


def measured_cost(model: CausalLM) -> KVCost:
    """Return the cost of rows of ``model`` as it runs now, in the dtypes that it computes in."""
    long = _kept(model, _LONG)
    if isinstance(long, KVCache):
        return long.cost()
    short = _kept(model, _SHORT)
    assert isinstance(long, RowsCache)
    assert isinstance(short, RowsCache)
    more, less = (_sizes([run.cache for run, _ in cache.runs()]) for cache in (long, short))
    # A window that is full grows no further, and a state doesn't grow at all: what grows here is taken to go on.
    token = (sum(more) - sum(less)) // (_LONG - _SHORT)
    part = (max(more, default=0) - max(less, default=0)) // (_LONG - _SHORT)
    return KVCost(token, min(max(part, 0), token), max(0, sum(less) - _SHORT * token), tables=False)


def _kept(model: CausalLM, tokens: int) -> Any:
    """Return the cache of one row of so many tokens."""
    prompts = Prompts.of(model, [torch.zeros(tokens, dtype=torch.int64)], [None])
    cache = model.new_cache()
    layout = cache.append(prompts.rows.lengths, 1)
    ids, positions = (x.to(model.model.device) for x in (prompts.rows.values, prompts.placed(layout.positions)))
    with torch.no_grad():
        model(ids, positions, layout, _nothing)
    return cache


def _nothing(hidden: torch.Tensor, head: Head) -> None:
    del hidden, head


def _sizes(held: Any) -> list[int]:
    """Return the bytes of each tensor in whatever a family holds."""
    if isinstance(held, torch.Tensor):
        return [held.nbytes]
    if isinstance(held, dict):
        return [size for value in held.values() for size in _sizes(value)]
    if isinstance(held, list | tuple):
        return [size for value in held for size in _sizes(value)]
    if hasattr(held, "__dict__") and not isinstance(held, PreTrainedConfig | nn.Module | type):
        return _sizes(vars(held))
    return []
