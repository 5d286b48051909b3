"""A small critic and batches for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForTokenClassification

from tandem.columns.proto import DataProto
from tandem.config.model import OptimConfig
from tandem.models.loading import prepared
from tandem.models.value_model import ValueModel
from tandem.train.value_engine import ValueEngine
from tests.train.conftest import LLAMA, build_batch


def value_engine(
    mesh: DeviceMesh | None = None,
    *,
    shape: dict[str, Any] = LLAMA,
    seed: int = 0,
    double: bool = False,
    max_tokens: int = 10_000,
    **options: Any,
) -> ValueEngine:
    """A critic whose head is not zero, so that every weight has a gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = AutoModelForTokenClassification.from_config(AutoConfig.for_model(**shape, num_labels=1))
        plain.eval()
        model = ValueModel(prepared(plain.double() if double else plain))
        torch.nn.init.normal_(model.head.weight)
    return ValueEngine(
        model,
        total_updates=100,
        max_tokens_per_micro_batch=max_tokens,
        temperature=1.0,
        mesh=mesh,
        **{"optim": OptimConfig(lr=1e-3), **options},
    )


def valued_batch(lengths: Sequence[int], *, seed: int = 0, masked: bool = False, **shape: Any) -> DataProto:
    """Samples with ``values`` and ``returns``; with ``masked``, every third token was put there by a tool."""
    batch = build_batch(lengths, seed=seed, **shape)
    responses, generator = batch.ragged("responses"), torch.Generator().manual_seed(seed + 1)
    total = len(responses.values)
    for name in ("values", "returns"):
        batch.batch[name] = responses.like(torch.randn(total, generator=generator))
    if masked:
        batch.batch["response_mask"] = responses.like(torch.arange(total) % 3 != 1)
    return batch
