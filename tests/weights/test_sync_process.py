"""Weights from a trained model to an engine in a process of its own, while it generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tandem.models.loading import as_causal_lm
from tandem.models.lora import get_lora_model, merged_weights
from tandem.rollout.hf import HfEngine
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import GroupOutput, Sampling
from tandem.rollout.spec import EngineSpec
from tandem.weights.sync import SharedSnapshots, WeightSync
from tests.rollout.tiny_models import llama, requests, tokens

SAMPLING = Sampling(n=2, max_tokens=60, stop_token_ids=(0,))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessEngine]:
    folder: Path = tmp_path_factory.mktemp("model")
    llama(0, tied=True).save_pretrained(folder)
    spec = EngineSpec(model=str(folder), exact=True, version=-1, max_num_seqs=4, threads=1)
    with ProcessEngine("rollout-0", spec, deadline_s=60.0) as engine:
        yield engine


def adapted(model: PreTrainedModel, rank: int, step: int) -> PreTrainedModel:
    """``model`` after so many steps, by its adapters or as a whole."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.1 if rank else 0.02))
    return model


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_overlapped_pushes_reach_a_generation_under_way(engine: ProcessEngine, lora_rank: int) -> None:
    model = llama(0, tied=True)
    get_lora_model(model, lora_rank)
    acknowledged: list[int] = []
    first = engine.version + 1
    sync = WeightSync(
        SharedSnapshots(lambda: merged_weights(model)),
        {engine.name: engine},
        require_actor=lambda purpose: None,
        acknowledged=lambda name, version: acknowledged.append(version),
        overlap=True,
        deadline_s=60.0,
    )
    if first:
        engine.load(merged_weights(model), first - 1)
    outputs: list[GroupOutput] = []
    for output in engine.generate(requests(8), SAMPLING):
        outputs.append(output)
        adapted(model, lora_rank, step=len(outputs))
        sync.push(first + len(outputs) - 1)
        sync.check()
    sync.wait()
    assert acknowledged == list(range(first, first + 8))
    assert engine.version == engine.ping(20.0) == first + 7
    labels = [s.versions.tolist() for o in outputs for s in o.samples]
    assert all(versions == sorted(versions) for versions in labels)
    assert any(len(set(versions)) > 1 for versions in labels)
    local = HfEngine(as_causal_lm(llama(9, tied=True)), exact=True, max_num_seqs=4)
    local.load(merged_weights(model), first + 7)
    assert tokens(list(engine.generate(requests(3), SAMPLING))) == tokens(list(local.generate(requests(3), SAMPLING)))
