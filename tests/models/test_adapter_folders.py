"""Adapters into folders of PEFT and out of them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.base.errors import DataError
from tandem.models.adapter_spec import CONFIG, WEIGHTS, AdapterSpec
from tandem.models.adapters import read_base, save_adapter, with_adapters
from tandem.models.loading import load_causal_lm, merge_adapter
from tandem.models.lora import adapter_weights, merged_weights
from tests.rollout.tiny_models import gpt2, llama

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
SPEC = AdapterSpec(rank=4, alpha=8.0, target_modules="all-linear", seed=3)
KINDS = {
    "tied": (lambda: llama(0, tied=True), SPEC),
    "two of the modules": (lambda: llama(0), AdapterSpec(rank=2, alpha=3.0, target_modules=("q_proj", "down_proj"))),
    "transposed": (lambda: gpt2(0), SPEC),
}

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def trained(plain: PreTrainedModel, spec: AdapterSpec) -> PeftModel:
    model = with_adapters(plain, spec)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_what_peft_and_a_later_run_load(kind: str, tmp_path: Path) -> None:
    make, spec = KINDS[kind]
    base, folder = tmp_path / "base", tmp_path / "adapter"
    make().save_pretrained(base)
    model = trained(make(), spec)
    plain = model.get_base_model()
    assert isinstance(plain, PreTrainedModel)
    save_adapter(dict(adapter_weights(plain)), spec, folder, base=str(base))
    assert read_base(folder) == str(base)
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    assert torch.equal(logits(by_peft), logits(model))
    again = load_causal_lm(base, adapter=AdapterSpec(path=str(folder)))
    weights = dict(adapter_weights(again.model))
    assert all(torch.equal(weights[name], tensor) for name, tensor in adapter_weights(plain))
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in again.model.named_parameters())
    merge_adapter(folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=1e-4)
    assert merged.state_dict().keys() == make().state_dict().keys()
    assert all(torch.equal(merged.state_dict()[name], tensor) for name, tensor in merged_weights(plain))


def test_what_peft_saved_is_loaded_with_its_own_scale(tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_alpha=5, use_rslora=True, target_modules=["v_proj"], lora_dropout=0.3)
    model = get_peft_model(llama(0), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    model.save_pretrained(str(tmp_path / "adapter"))
    llama(0).save_pretrained(tmp_path / "base")
    merged = dict(
        merged_weights(load_causal_lm(tmp_path / "base", adapter=AdapterSpec(path=str(tmp_path / "adapter"))).model)
    )
    expected = logits(model.eval())
    restored = llama(1)
    restored.load_state_dict(merged)
    torch.testing.assert_close(logits(restored), expected, atol=1e-4, rtol=1e-4)


def saved(tmp_path: Path, **changes: Any) -> str:
    """A good folder with some of its config changed."""
    folder = tmp_path / "adapter"
    plain = with_adapters(llama(0), SPEC).get_base_model()
    assert isinstance(plain, PreTrainedModel)
    save_adapter(dict(adapter_weights(plain)), SPEC, folder, base="somewhere")
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_alpha": 0}, "its adapter_config.json has the lora_alpha 0"),
        ({"r": 2}, "could not be loaded"),
        ({"target_modules": ["q_proj"]}, "only in its file"),
        ({"target_modules": ["nothing_proj"]}, "could not be loaded"),
        ({"use_dora": True}, "DoRA|only in the model"),
    ],
)
def test_a_folder_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    llama(0).save_pretrained(tmp_path / "base")
    with pytest.raises(DataError, match=said):
        load_causal_lm(tmp_path / "base", adapter=AdapterSpec(path=saved(tmp_path, **changes)))


def test_half_of_the_weights_and_none_are_refused(tmp_path: Path) -> None:
    llama(0).save_pretrained(tmp_path / "base")
    spec = AdapterSpec(path=saved(tmp_path))
    weights = load_file(file := tmp_path / "adapter" / WEIGHTS)
    save_file({name: tensor for name, tensor in weights.items() if "lora_A" in name}, file)
    with pytest.raises(DataError, match="only in the model"):
        load_causal_lm(tmp_path / "base", adapter=spec)
    file.unlink()
    with pytest.raises(DataError, match="could not be loaded"):
        load_causal_lm(tmp_path / "base", adapter=spec)
