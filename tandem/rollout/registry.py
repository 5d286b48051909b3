"""Rollout engines by name. Importing this costs no torch, so that a plan can read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.base.errors import TandemError
from tandem.base.registry import Entry, Registry, Scope

if TYPE_CHECKING:
    from tandem.models.causal_lm import CausalLM
    from tandem.rollout.protocol import KeepKV, RolloutEngine

LATER: dict[str, str] = {
    "vllm": "the vllm engine comes later; write rollout.name: hf",
    "sglang": "the sglang engine comes later; write rollout.name: hf",
}
"""Names that the config knows but that can't run yet, each with the line that says so."""

engines: Registry[Callable[..., RolloutEngine]] = Registry("rollout engine")
"""Factories ``(model: CausalLM, *, shares_weights, version, exact, max_num_seqs, max_num_batched_tokens, keep_kv)``."""

register_engine = engines.register
"""The trait ``adapters=True`` says that ``load`` takes adapters alone where ``model`` has them."""


def find_engine(name: str) -> Entry[Callable[..., RolloutEngine]]:
    """The registered engine ``name``. Raises ``TandemError`` for one that comes later, and for an unknown name."""
    if name in LATER:
        raise TandemError(f"rollout engine {name!r}: {LATER[name]}")
    return engines[name]


@register_engine("hf", scope=Scope.SEQUENCE, adapters=True)
def hf(
    model: CausalLM,
    *,
    shares_weights: bool = False,
    version: int = 0,
    exact: bool = False,
    max_num_seqs: int = 512,
    max_num_batched_tokens: int = 16384,
    keep_kv: KeepKV = "old",
) -> RolloutEngine:
    """Batched generation on transformers models, in this process. See ``tandem.rollout.hf.HfEngine``."""
    from tandem.rollout.hf import HfEngine

    return HfEngine(
        model,
        shares_weights=shares_weights,
        version=version,
        exact=exact,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        keep_kv=keep_kv,
    )
