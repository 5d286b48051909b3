"""Engines for tests of processes: small, registered by name, without a model's cost where none is needed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator

import torch

from tandem.base.errors import ContractError
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import load_causal_lm
from tandem.rollout.capabilities import EngineCapabilities
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling
from tandem.rollout.registry import register_engine


class FaultyEngine(HfEngine):
    """Obeys the first token of a prompt: 30 raises, 32 hangs, 33 refuses."""

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        return super().generate(self._obeyed(requests), sampling)

    def _obeyed(self, requests: Iterable[GroupRequest | None]) -> Iterator[GroupRequest | None]:
        for request in requests:
            if request is not None:
                self._obey(int(request.prompt_ids[0]))
            yield request

    def _obey(self, order: int) -> None:
        if order == 30:
            raise ValueError("a defect inside the engine")
        if order == 32:
            time.sleep(1000)
        if order == 33:
            raise ContractError("order 33 is refused")


@register_engine("test_faulty", capabilities=EngineCapabilities(weights=("own",), in_flight=("abort", "keep")))
def faulty(
    model: CausalLM,
    *,
    shares_weights: bool,
    version: int,
    exact: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    keep_kv: str,
) -> FaultyEngine:
    return FaultyEngine(model, version=version, exact=exact, max_num_seqs=max_num_seqs, patience=20.0)


@register_engine("test_elsewhere", capabilities=EngineCapabilities(weights=("own",), wants="path"))
class ElsewhereEngine(HfEngine):
    """Loads the model itself, and only in the environment that ``ELSEWHERE`` marks, without packages of another."""

    def __init__(self, path: str, *, version: int, max_num_seqs: int) -> None:
        inherited = [folder for folder in os.environ["PYTHONPATH"].split(os.pathsep) if "packages" in folder]
        if "ELSEWHERE" not in os.environ or inherited:
            raise ContractError(f"{sys.executable} is not elsewhere: it inherits {inherited}")
        super().__init__(load_causal_lm(path), version=version, max_num_seqs=max_num_seqs)


def order(number: int) -> GroupRequest:
    return GroupRequest(f"order {number}", torch.tensor([number, 1, 2]), (1, 2))
