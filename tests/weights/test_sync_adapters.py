"""Adapters alone on their way to engines that have the base weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tandem.base.errors import ContractError, TandemError
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.adapters import with_adapters
from tandem.models.causal_lm import CausalLM
from tandem.models.fingerprint import fingerprint
from tandem.models.loading import as_causal_lm
from tandem.models.lora import adapter_weights, base_weights, merged_weights
from tandem.rollout.hf import HfEngine
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import Sampling
from tandem.rollout.spec import EngineSpec
from tandem.weights.sync import Receiver, SharedSnapshots, WeightSync
from tests.rollout.tiny_models import bits, llama, requests

SPEC = AdapterSpec(rank=4, alpha=8.0, target_modules="all-linear", seed=3)
SAMPLING = Sampling(n=2, max_tokens=12, stop_token_ids=(0,))


def adapted(seed: int = 0, spec: AdapterSpec = SPEC) -> CausalLM:
    return as_causal_lm(with_adapters(llama(seed, tied=True), spec))


def moved(model: PreTrainedModel, step: int) -> None:
    """Adapters as after a step of training."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def sync_of(model: PreTrainedModel, engine: Receiver) -> WeightSync:
    return WeightSync(
        SharedSnapshots(lambda: adapter_weights(model), base=lambda: fingerprint(base_weights(model))),
        {"rollout-0": engine},
        require_actor=lambda purpose: None,
        acknowledged=lambda name, version: None,
        deadline_s=60.0,
    )


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessEngine]:
    folder: Path = tmp_path_factory.mktemp("model")
    llama(0, tied=True).save_pretrained(folder)
    spec = EngineSpec(model=str(folder), exact=True, version=-1, max_num_seqs=4, threads=1, adapter=SPEC)
    with ProcessEngine("rollout-0", spec, deadline_s=60.0) as engine:
        yield engine


def test_a_push_carries_adapters_only_and_the_engine_computes_what_the_trainer_does(hosted: ProcessEngine) -> None:
    trained = adapted()
    sync = sync_of(trained.model, hosted)
    seen = []
    for version in range(2):
        moved(trained.model, version)
        sync.push(version)
        own = HfEngine(trained, shares_weights=True, exact=True, max_num_seqs=4)
        there = bits(list(hosted.generate(requests(3), SAMPLING)))
        assert there == bits(list(own.generate(requests(3), SAMPLING)))
        seen.append(there)
    assert seen[0] != seen[1]
    adapters = dict(adapter_weights(trained.model))
    assert sync.nbytes == sum(tensor.nbytes for tensor in adapters.values())
    assert sync.nbytes * 2 < sum(tensor.nbytes for _, tensor in merged_weights(trained.model))
    assert len(adapters) == 2 * 14  # two matrices for each of a layer's seven


def test_another_base_is_found_out_by_the_fingerprint() -> None:
    trained = adapted()
    sync_of(trained.model, HfEngine(adapted(), version=-1)).push(0)
    with pytest.raises(TandemError, match="it does not generate with what was sent"):
        sync_of(trained.model, HfEngine(adapted(seed=1), version=-1)).push(0)


@pytest.mark.parametrize("whole_engine", [True, False])
def test_whole_weights_and_adapters_are_not_taken_for_each_other(whole_engine: bool) -> None:
    trained = adapted()
    engine = HfEngine(as_causal_lm(llama(0, tied=True)) if whole_engine else adapted(), version=-1)
    sent = adapter_weights(trained.model) if whole_engine else merged_weights(trained.model)
    with pytest.raises(ContractError, match="no weight" if whole_engine else "takes adapters alone"):
        engine.load(sent, 0)


def test_half_of_the_adapters_are_not_enough() -> None:
    trained = adapted()
    half = list(adapter_weights(trained.model))[::2]
    with pytest.raises(ContractError, match="14 weights did not come"):
        HfEngine(adapted(), version=-1).load(half, 0)


def test_samples_of_merged_and_of_separate_adapters_agree_up_to_rounding() -> None:
    trained = adapted()
    moved(trained.model, 0)
    whole, separate = HfEngine(as_causal_lm(llama(1, tied=True)), version=-1), HfEngine(adapted(), version=-1)
    whole.load(merged_weights(trained.model), 0)
    separate.load(adapter_weights(trained.model), 0)
    for one, two in zip(whole.generate(requests(4), SAMPLING), separate.generate(requests(4), SAMPLING), strict=True):
        for left, right in zip(one.samples, two.samples, strict=True):
            assert torch.equal(left.token_ids, right.token_ids)
            torch.testing.assert_close(left.logprobs, right.logprobs, atol=1e-4, rtol=1e-4)


def test_a_base_in_bfloat16_changes_no_bit_of_a_forward_in_bfloat16() -> None:
    half = AdapterSpec(rank=4, alpha=8.0, target_modules="all-linear", seed=3, base_dtype="bfloat16")
    found = []
    for spec in (SPEC, half):
        model = as_causal_lm(with_adapters(llama(0, tied=True), spec), dtype="bfloat16")
        moved(model.model, 0)
        found.append(bits(list(HfEngine(model, shares_weights=True).generate(requests(3), SAMPLING))))
        held = {tensor.dtype for name, tensor in base_weights(model.model) if ".base_layer.weight" in name}
        assert held == {getattr(torch, spec.base_dtype)}
        assert all(tensor.dtype == torch.float32 for _, tensor in adapter_weights(model.model))
    assert found[0] == found[1]
