"""LoRA adapters (arXiv 2106.09685) through peft."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.base.errors import ContractError
from tandem.base.lazy import LazyModule
from tandem.config.model import ModelConfig
from tandem.models.families import IMAGE_FAMILIES, UNADAPTED

if TYPE_CHECKING:
    import peft
else:  # imported where there are adapters: it takes a sixth of the time that a process needs to start
    peft = LazyModule("peft")

Model = TypeVar("Model", bound=PreTrainedModel)
Tuned: TypeAlias = "PreTrainedModel | peft.PeftModel"
"""A model, with adapters or without."""

_ALPHA: float = ModelConfig.model_fields["lora_alpha"].default
_TARGETS: list[str] | str = ModelConfig.model_fields["lora_target_modules"].default


def get_lora_model(
    model: Model,
    lora_rank: int,
    *,
    alpha: float = _ALPHA,
    target_modules: Sequence[str] | str = _TARGETS,
    seed: int = 0,
) -> Model | peft.PeftModel:
    """Return ``model`` with adapters of rank ``lora_rank`` as its only trained weights; rank 0 gives it back as it is.

    The layers of ``model`` itself are replaced. Adapters start as a change of zero; their random half depends on
    ``seed`` only. ``alpha / lora_rank`` scales the change. ``target_modules`` are module names or ``"all-linear"``.
    Example::

        model = get_lora_model(load_model("Qwen/Qwen3-0.6B"), lora_rank=16, target_modules=["q_proj", "v_proj"])
    """
    if lora_rank < 0:
        raise ContractError(f"lora_rank = {lora_rank}: write 0 to train all weights, or a positive rank such as 16")
    if lora_rank == 0:
        return model
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    targets = modules_to_adapt(model, target_modules, head)
    config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=lora_rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # a float is fine: it is only divided
        target_modules=targets,
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, config)
    assert isinstance(adapted, peft.PeftModel)
    if isinstance(model.get_output_embeddings(), peft.tuners.lora.LoraLayer):  # type: ignore[no-untyped-call]
        raise ContractError(f"target_modules = {target_modules!r} puts an adapter on the head: leave lm_head out of it")
    return adapted


def modules_to_adapt(model: PreTrainedModel, targets: Sequence[str] | str, head: nn.Module | None) -> list[str] | str:
    """Return the names of the modules of ``model`` that ``targets`` mean; a pattern, which PEFT knows how to read,
    stays one.

    ``"all-linear"`` is every linear module but the ``head``, and leaves out what has no adapter: experts that are one
    parameter of a layer, their routers, and what PEFT takes for them. Raises ``ContractError`` for a name without a
    module.
    """
    able = _adaptable(model)
    if targets == "all-linear":
        return [name for name, module in able.items() if module is not head]
    if isinstance(targets, str):
        return targets
    found: dict[str, None] = {}
    for target in targets:
        meant = [name for name in able if name == target or name.endswith(f".{target}")]
        if not meant:
            fused = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dim() > 2}
            why = (
                "is one parameter for all experts of a layer" if target in fused else "is no module that can be adapted"
            )
            known = ", ".join(sorted({name.rpartition(".")[2] for name, module in able.items() if module is not head}))
            raise ContractError(
                f"target_modules: {target!r} {why} in the family {model.config.model_type}: name some of {known}"
            )
        found |= dict.fromkeys(meant)
    return list(found)


def _adaptable(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear modules of ``model``, by name; of one that sees, those of its language part. A router gives
    more than its product, whatever it derives from.
    """
    unfit = UNADAPTED.get(model.config.model_type, frozenset())
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and not (model.config.model_type in IMAGE_FAMILIES and ".visual." in f".{name}")
        and "Router" not in type(module).__name__
        and name.rpartition(".")[2] not in unfit
    }
    taken = {leaf for leaf in {name.rpartition(".")[2] for name in linear} if _means_experts(model, leaf)}
    return {name: module for name, module in linear.items() if name.rpartition(".")[2] not in taken}


def _means_experts(model: PreTrainedModel, name: str) -> bool:
    """Return whether PEFT takes a target of this ``name`` for a parameter of fused experts: what the name meant
    before.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = peft.LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, [])
    except ValueError:  # it wants others of the same parameter too
        return True
    return name not in (config.target_modules or ())


def hold_base(model: PreTrainedModel, dtype: str) -> None:
    """Cast the frozen weights of the layers that have adapters."""
    for layer in adapted_layers(model).values():
        base: Any = layer.get_base_layer()
        base.weight.data = base.weight.data.to(getattr(torch, dtype))


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of all weights under the names that they have without adapters, adapters added in.

    Sharded tensors are gathered one at a time, by all ranks together. What has no adapter shares the model's memory.
    """
    adapted = adapted_layers(model)
    for name, tensor in model.state_dict().items():
        owner, _, rest = name.rpartition(".base_layer.")
        if owner in adapted:
            change = _change(adapted[owner]) if rest == "weight" else 0
            yield f"{owner}.{rest}", _full(tensor) + change
        elif not is_adapter(name):
            yield name, _full(tensor)


def adapter_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of the adapters alone, as ``state_dict`` names them; gathered as ``merged_weights``
    does.
    """
    return ((name, _full(tensor)) for name, tensor in model.state_dict().items() if is_adapter(name))


def base_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of everything that ``adapter_weights`` leaves out."""
    return ((name, _full(tensor)) for name, tensor in model.state_dict().items() if not is_adapter(name))


def is_adapter(name: str) -> bool:
    """Return whether a weight of this name belongs to an adapter."""
    return any(part.startswith("lora_") for part in name.split("."))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute as it did without adapters, bit by bit, until the end of the block.

    Only for no-grad forwards.
    """
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapted_layers(model: nn.Module) -> dict[str, peft.tuners.lora.LoraLayer]:
    """Return the layers of ``model`` that have adapters, by name."""
    if "peft" not in sys.modules:
        return {}  # nothing has made any
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)}


def _change(layer: Any) -> torch.Tensor:
    """Return what the active adapters add to the base weight, in its layout."""
    total: torch.Tensor | None = None
    for adapter in layer.active_adapters:
        down, up = (_full(getattr(layer, part)[adapter].weight) for part in ("lora_A", "lora_B"))
        change: torch.Tensor = layer.scaling[adapter] * (up @ down)
        total = change if total is None else total + change
    if total is None:
        raise ContractError("a LoRA layer has no active adapter: enable one before exporting weights")
    return total.T if layer.fan_in_fan_out else total


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
