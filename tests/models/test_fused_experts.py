"""Adapters on models whose experts are one parameter a layer: linear modules get some, experts are left out by name."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open

from tandem.base.errors import ContractError, DataError
from tandem.config.model import ModelConfig
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.adapters import load_adapter, save_adapter
from tandem.models.families import FUSED_EXPERTS, FUSED_NAMES, UNADAPTED, loaded_name, without_adapter
from tandem.models.loading import as_causal_lm
from tandem.models.lora import adapter_weights, get_lora_model, merged_weights, modules_to_adapt
from tandem.models.probe import prove
from tandem.models.value_model import load_value_model
from tandem.plan.checks.model.adapters import check_adapters
from tandem.plan.files.model import read_model
from tools.families import FAMILIES, build

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def leaves(names: list[str] | str) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "llama4_text"])
def test_all_linear_adapts_what_is_linear_and_the_merged_export_is_a_plain_model(family: str) -> None:
    plain = build(family)
    model = as_causal_lm(get_lora_model(copy.deepcopy(plain), 4))
    prove(model, "training")
    adapted = {name for name in model.state_dict() if "lora_A" in name}
    assert adapted and not any(".experts." in name or "router" in name for name in adapted)
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    merged = dict(merged_weights(model.model))
    assert merged.keys() == plain.state_dict().keys()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        plain.load_state_dict(merged)
        model.take("rows")
        torch.testing.assert_close(plain(ids).logits, model.model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FUSED_EXPERTS)
def test_the_plan_leaves_out_what_the_model_has_no_module_for(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys()) if name.endswith(".weight")}
    names = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    in_layers = [name for name in names if any(part.isdigit() for part in name.split("."))]
    taken = modules_to_adapt(model, "all-linear", model.get_output_embeddings())
    planned = [name for name in in_layers if not without_adapter((family,), name)]
    planned = [loaded_name((family,), name) for name in planned]
    assert leaves(planned) == leaves([name for name in taken if name != "lm_head"])
    assert all(without_adapter((family,), name) for name in names if ".experts.0." in name)
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dim() == 3} >= FUSED_NAMES


def test_every_family_with_such_experts_is_known_to_the_plan() -> None:
    """By the name of the class that holds them; a family that refuses to be run needs no adapter."""
    unknown = []
    for family in FAMILIES:
        if family.endswith(("moe", "moe_text")) and family not in FUSED_EXPERTS:
            kinds = {type(module).__name__ for module in build(family).modules()}
            unknown += [family for kind in kinds if kind.endswith("Experts") and "Parallel" not in kind]
    assert unknown == []


@pytest.mark.parametrize("family", UNADAPTED)
def test_what_only_looks_linear_is_left_out_of_all_linear_and_refused_by_name(family: str, tmp_path: Path) -> None:
    plain = build(family)
    plain.save_pretrained(tmp_path)
    prove(as_causal_lm(get_lora_model(copy.deepcopy(plain), 2)), "training")
    unfit = sorted(UNADAPTED[family])
    model = ModelConfig(path=str(tmp_path), lora_rank=2, lora_target_modules=unfit[-1:])
    (problem,) = check_adapters("model", model, read_model(tmp_path))
    assert f"of the family {family}" in problem.reason and "can't have an adapter" in problem.reason
    with pytest.raises(ContractError, match="is no module that can be adapted"):
        get_lora_model(plain, 2, target_modules=unfit[:1])


def test_modules_of_a_family_that_renames_them_are_called_alike_by_plan_and_load(tmp_path: Path) -> None:
    plain = build("bailing_hybrid")
    plain.save_pretrained(tmp_path)
    facts = read_model(tmp_path)
    assert facts.matrices.keys() - {name.removesuffix(".weight") for name in plain.state_dict()} <= {
        name for name in facts.matrices if ".layers." not in name or ".experts." in name or "conv1d" in name
    }
    for target, there in (("o_proj", True), ("dense", False), ("f_proj", True), ("forget_gate.f_proj", True)):
        model = ModelConfig(path=str(tmp_path), lora_rank=2, lora_target_modules=[target])
        assert (not list(check_adapters("model", model, facts))) == there
        with nullcontext() if there else pytest.raises(ContractError, match="no module that can be adapted"):
            get_lora_model(build("bailing_hybrid"), 2, target_modules=[target])


@pytest.mark.parametrize(
    ("family", "target"), [("mixtral", "gate_up_proj"), ("mixtral", "w1"), ("qwen3_moe", "down_proj")]
)
def test_a_target_that_means_experts_is_refused_with_what_there_is(family: str, target: str) -> None:
    with pytest.raises(ContractError, match=rf"'{target}' is .* in the family {family}: name some of k_proj, o_proj"):
        get_lora_model(build(family), 4, target_modules=["q_proj", target])


def test_adapters_that_are_saved_go_onto_the_model_again_through_peft(tmp_path: Path) -> None:
    plain = build("qwen2_moe")
    adapted = get_lora_model(copy.deepcopy(plain), 4, seed=3)
    assert isinstance(adapted, PeftModel)
    weights = dict(adapter_weights(adapted.get_base_model()))
    save_adapter(weights, AdapterSpec(rank=4, alpha=8.0), tmp_path / "adapter", base="nowhere")
    again = load_adapter(plain, str(tmp_path / "adapter"))
    for name, tensor in adapter_weights(again.get_base_model()):
        assert torch.equal(tensor, weights[name])


def test_adapters_of_experts_that_others_trained_are_refused(tmp_path: Path) -> None:
    get_peft_model(build("qwen3_moe"), LoraConfig(target_parameters=["down_proj"])).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"experts is adapted, which is no linear module.*merge it"):
        load_adapter(build("qwen3_moe"), str(tmp_path))


def test_a_critic_on_such_a_model_gets_adapters_too(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    model = load_value_model(ModelConfig(path=str(tmp_path), lora_rank=2))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained if "lora_" in name} == ATTENTION
