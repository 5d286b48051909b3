"""The critic's model: a value head on any causal LM that transformers can give one, zero until something is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tandem.base.errors import DataError
from tandem.config.model import ModelConfig
from tandem.models.head.projection import Head
from tandem.models.layouts.packing import PackedLayout
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.value_model import load_value_model, token_values

TINY = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY},
    "qwen3, tied": {
        "model_type": "qwen3",
        "head_dim": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        **TINY,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
}


@pytest.fixture(params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A causal LM of some architecture."""
    save_pretrained_atomic(new_model(SHAPES[request.param], seed=0), None, tmp_path / "actor")
    return tmp_path / "actor"


def test_a_new_head_is_zero_and_the_rest_is_the_actors(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    before = torch.get_rng_state()
    critic = load_value_model(ModelConfig(path=str(folder)))
    assert torch.equal(torch.get_rng_state(), before)
    assert "MISSING" not in "".join(capfd.readouterr())
    head = critic.head
    assert head.weight.shape == (1, 16) and head.bias is not None
    assert not head.weight.any() and not head.bias.any()
    actor = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    same = [name for name, tensor in critic.model.state_dict().items() if name in actor and tensor.equal(actor[name])]
    assert len(same) == len(critic.model.state_dict()) - 2


def test_a_saved_critic_keeps_what_it_learned_and_is_one_for_transformers_too(folder: Path, tmp_path: Path) -> None:
    critic = load_value_model(ModelConfig(path=str(folder)))
    with torch.no_grad():
        critic.head.weight.normal_()
        assert critic.head.bias is not None
        critic.head.bias.fill_(0.25)
    save_pretrained_atomic(critic, None, tmp_path / "critic")
    again = load_value_model(ModelConfig(path=str(tmp_path / "critic")))
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    ids = torch.tensor([3, 1, 4, 1, 5])
    layout = PackedLayout.of_lengths(torch.tensor([5]))
    values = again(ids, torch.arange(5), layout, token_values)
    torch.testing.assert_close(values, plain(ids[None]).logits[0, :, 0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(values, critic(ids, torch.arange(5), layout, token_values), atol=1e-6, rtol=1e-5)


def test_a_reward_model_brings_its_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_pretrained_atomic(new_model(SHAPES["llama"], seed=0), None, tmp_path / "actor")
    reward = AutoModelForSequenceClassification.from_pretrained(tmp_path / "actor", num_labels=1)
    reward.save_pretrained(tmp_path / "reward")
    critic = load_value_model(ModelConfig(path=str(tmp_path / "reward")))
    assert torch.equal(critic.head.weight, reward.score.weight)
    assert critic.head.bias is not None and not critic.head.bias.any()


def test_values_are_float32_whatever_is_computed_in(folder: Path) -> None:
    critic = load_value_model(ModelConfig(path=str(folder), dtype="bfloat16"))
    with torch.no_grad():
        critic.head.weight.normal_()
    values = critic(torch.arange(4), torch.arange(4), PackedLayout.of_lengths(torch.tensor([4])), token_values)
    assert values.dtype == torch.float32
    exact = values.to(torch.bfloat16).float()
    assert not torch.equal(values, exact)  # the head itself is not rounded


def test_adapters_and_the_head_are_what_is_trained(folder: Path) -> None:
    critic = load_value_model(ModelConfig(path=str(folder), lora_rank=2))
    trained = {name for name, p in critic.model.named_parameters() if p.requires_grad}
    head = {id(critic.head.weight), id(critic.head.bias)}
    own = {name for name, p in critic.model.named_parameters() if id(p) in head}
    assert len(own) == 2 and own < trained
    assert all("lora_" in name for name in trained - own)
    again = load_value_model(ModelConfig(path=str(folder), lora_rank=2))
    states = critic.model.state_dict(), again.model.state_dict()
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())


def test_a_model_that_can_have_no_such_head_is_named(tmp_path: Path) -> None:
    shape = {"model_type": "granite", "num_key_value_heads": 1, **TINY}
    save_pretrained_atomic(new_model(shape, seed=0), None, tmp_path / "granite")
    with pytest.raises(DataError, match="granite"):
        load_value_model(ModelConfig(path=str(tmp_path / "granite")))
    with pytest.raises(DataError, match=r"no config\.json"):
        (tmp_path / "empty").mkdir()
        load_value_model(ModelConfig(path=str(tmp_path / "empty")))
    torch.manual_seed(0)
    save_pretrained_atomic(new_model(SHAPES["llama"], seed=0), None, tmp_path / "actor")
    two = AutoModelForTokenClassification.from_pretrained(tmp_path / "actor", num_labels=2)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(DataError, match="two"):
        load_value_model(ModelConfig(path=str(tmp_path / "two")))


def test_a_head_reads_one_number_a_token() -> None:
    head = Head(torch.tensor([[1.0, 2.0]]), torch.tensor([0.5]))
    assert token_values(torch.tensor([[1.0, 1.0], [0.0, -1.0]]), head).tolist() == [3.5, -1.5]
