"""Engines that live apart from the trainer, as those of other packages do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from tandem.models.causal_lm import CausalLM
from tandem.models.fingerprint import fingerprint
from tandem.rollout.capabilities import EngineCapabilities
from tandem.rollout.hf import HfEngine
from tandem.rollout.registry import register_engine

APART = EngineCapabilities(weights=("own",), seeds=True, exact=True, frees=("kv_cache",))


@register_engine("test_apart", capabilities=APART)
class Apart(HfEngine):
    def __init__(self, model: CausalLM, *, version: int, exact: bool) -> None:
        super().__init__(model, version=version, exact=exact)


@register_engine("test_too", capabilities=APART)
class ApartToo(Apart):
    """Another of the same."""


@register_engine("test_silent", capabilities=APART)
class Silent(Apart):
    """Goes on with the weights that it has, under each new number."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        self._version = version
        return None


@register_engine("test_deaf", capabilities=replace(APART, proof="probe"))
class Deaf(Apart):
    """Answers for what came, and goes on with the weights that it has."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        assert weights is not None
        self._version = version
        return fingerprint(weights)
