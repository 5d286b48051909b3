"""Adapters: the only trained weights, merged on the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel

from tandem.base.errors import ContractError
from tandem.models.causal_lm import CausalLM
from tandem.models.layouts.packing import PackedLayout
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.lora import get_lora_model, merged_weights

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 17,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 17, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
IDS = torch.tensor([3, 1, 4, 1, 5, 9])


def logits(model: CausalLM) -> torch.Tensor:
    layout = PackedLayout.of_lengths(torch.tensor([len(IDS)]))
    return model(IDS, torch.arange(len(IDS)), layout, lambda hidden, head: head.logits(hidden))


def test_rank_zero_is_the_model_itself() -> None:
    model = new_model(SHAPES["llama"], seed=0)
    assert get_lora_model(model, 0) is model
    with pytest.raises(ContractError, match="lora_rank = -1"):
        get_lora_model(model, -1)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_only_adapters_learn_and_the_merged_export_is_a_plain_model(name: str) -> None:
    plain = new_model(SHAPES[name], seed=0)
    before = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    adapted = get_lora_model(new_model(SHAPES[name], seed=0), 4, alpha=8.0)
    assert isinstance(adapted, PeftModel)
    model = as_causal_lm(adapted)
    torch.testing.assert_close(logits(model), logits(as_causal_lm(plain)))

    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in key for key in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    for _ in range(2):
        logits(model)[:, 2].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    merged = dict(merged_weights(model.model))
    assert merged.keys() == before.keys()
    changed = {key for key in merged if not torch.equal(merged[key], before[key])}
    assert changed
    assert all("lm_head" not in key and "embed" not in key and "norm" not in key for key in changed)
    restored = new_model(SHAPES[name], seed=1)
    restored.load_state_dict(merged)
    torch.testing.assert_close(logits(as_causal_lm(restored)), logits(model), atol=1e-5, rtol=1e-4)


def test_adapters_depend_on_the_seed_only() -> None:
    def adapters(seed: int) -> list[torch.Tensor]:
        torch.rand(3)
        model = get_lora_model(new_model(SHAPES["llama"], seed=0), 2, seed=seed)
        return [p for key, p in model.named_parameters() if "lora_A" in key]

    assert all(map(torch.equal, adapters(1), adapters(1)))
    assert not any(map(torch.equal, adapters(1), adapters(2)))
