"""vLLM as it is by itself: a matrix that embeddings and head share, sent once, leaves the old head in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.rollout.cores.engine import CoreEngine
from tandem.rollout.protocol import RolloutEngine
from tandem.rollout.registry import capabilities_of, register_engine, vllm

CAN = capabilities_of("vllm")
assert CAN is not None


@register_engine("test_forgetful", capabilities=CAN)
def forgetful(path: str, *, version: int, max_num_seqs: int, context: int | None) -> RolloutEngine:
    """It takes everything over, and doesn't pack the head anew."""
    engine = vllm(path, version=version, max_num_seqs=max_num_seqs, context=context)
    assert isinstance(engine, CoreEngine)
    core = engine._core

    def take_over(weights: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
        once = [(name, tensor) for name, tensor in weights if name != "lm_head.weight"]
        core._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(once)})  # type: ignore[attr-defined]

    core.take_over = take_over  # type: ignore[method-assign]
    return engine
