"""The trainer's part of the probe, on real small models: right engines pass at any temperature, wrong ones don't."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.base.errors import TandemError
from tandem.config.model import OptimConfig
from tandem.models.causal_lm import CausalLM
from tandem.models.fingerprint import fingerprint
from tandem.models.loading import as_causal_lm
from tandem.roles.probing import TOLERANCES, LogprobProbe, ask, probe_prompts
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.rollout.hf import HfEngine
from tandem.train.engine import FsdpEngine
from tandem.weights.probe import Answer
from tandem.weights.sync import SharedSnapshots, WeightSync
from tests.rollout.tiny_models import V, llama

PROMPTS = [torch.arange(length) % V for length in (1, 3, 7, 12, 19, 28)]


def trainer(model: PreTrainedModel, temperature: float, dtype: Any = "float32") -> TrainGroup[TrainRank]:
    engine = FsdpEngine(
        as_causal_lm(model, dtype=dtype),
        optim=OptimConfig(),
        total_updates=1,
        max_tokens_per_micro_batch=64,
        temperature=temperature,
    )
    return TrainGroup.in_process(engine, deadline_s=60.0)


class Asked:
    """An engine as a receiver, as the loop has it."""

    def __init__(self, engine: HfEngine) -> None:
        self.engine = engine

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
        return self.engine.load(weights, version)

    def answer(self, prompts: Sequence[torch.Tensor]) -> list[Answer]:
        return ask(self.engine, prompts, True)


class OldHead(Asked):
    """Takes everything but the head, which it packed at its start, and answers for all that came."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
        came = dict(weights)
        head = self.model.model.lm_head.weight.detach().clone()
        self.engine.load({**came, "lm_head.weight": head}.items(), version)
        return fingerprint(came.items())

    @property
    def model(self) -> CausalLM:
        return self.engine._model


def push(model: PreTrainedModel, receiver: Asked, temperature: float, dtype: Any = "float32") -> None:
    group = trainer(model, temperature, dtype)
    probe = LogprobProbe(group, PROMPTS, tokens=model.config.vocab_size, every=10, tolerance=TOLERANCES[dtype])
    sync = WeightSync(
        SharedSnapshots(lambda: group.export()),
        {"rollout-0": receiver},
        require_actor=lambda purpose: None,
        acknowledged=lambda name, version: None,
        probe=probe,
    )
    sync.push(3)
    assert "probe" in sync.arrived
    sync.push(4)
    assert "probe" not in sync.arrived


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_right_engine_passes_whatever_the_temperature_of_training(temperature: float, dtype: Any, tied: bool) -> None:
    engine = HfEngine(as_causal_lm(llama(0, tied=tied), dtype=dtype), version=2)
    push(llama(1, tied=tied), Asked(engine), temperature, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_keeps_its_old_head_is_caught_at_the_first_push(dtype: Any) -> None:
    engine = HfEngine(as_causal_lm(llama(0), dtype=dtype), version=2)
    with pytest.raises(TandemError, match="does not generate with weights version 3"):
        push(llama(1), OldHead(engine), 1.0, dtype)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_small_change_of_one_matrix_that_an_engine_misses_is_seen_in_full_precision(name: str) -> None:
    old = llama(1)
    new = llama(1)
    with torch.no_grad():
        new.get_parameter(name).mul_(1.02)

    class Misses(Asked):
        def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
            came = dict(weights)
            kept = old.get_parameter(name).detach()
            self.engine.load({**came, name: kept}.items(), version)
            return fingerprint(came.items())

    with pytest.raises(TandemError, match="does not generate with weights version 3"):
        push(new, Misses(HfEngine(as_causal_lm(llama(0)), version=2)), 1.0)


class Words:
    """As much of a tokenizer as is asked."""

    all_special_ids = (0, 1)

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(30)}


def test_prompts_are_the_same_ones_of_ordinary_tokens_no_longer_than_asked() -> None:
    tokenizer: Any = Words()
    prompts = probe_prompts(tokenizer, 9)
    assert [p.tolist() for p in prompts] == [p.tolist() for p in probe_prompts(tokenizer, 9)]
    assert {len(prompt) for prompt in prompts} == {1, 3, 7, 9}
    assert all(2 <= int(token) < 30 for prompt in prompts for token in prompt)
