"""Contradictions about adapters: what is adapted, what a push carries, what a run leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.base.errors import Problem
from tandem.base.registry import near
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.config.trainer import TrainerConfig
from tandem.models.families import FUSED_EXPERTS, FUSED_NAMES, UNADAPTED, notes_on_adapters, without_adapter
from tandem.models.folder.described import fault_of_adapter
from tandem.plan.files.model import ModelFacts
from tandem.plan.parts.adapters import (
    ADAPTER,
    adaptable,
    adapted_modules,
    in_a_layer,
    is_target,
    pushed_part,
    read_adapter,
)
from tandem.plan.parts.engine import engine_capabilities
from tandem.rollout.registry import engines

SYNC = "execution.weight_sync.lora"

_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
}
"""What PEFT's config says of LoRA that is two matrices beside a linear module, and nothing more."""


def check_adapters(key: str, model: ModelConfig, facts: ModelFacts | None) -> Iterator[Problem]:
    """Check whether LoRA, where it is on, has something to adapt, and can."""
    dtype = model.lora_base_dtype
    if dtype != "float32" and model.trains_adapters and model.dtype == "float32":
        reason = f"the forward computes in float32 ({key}.dtype), so the weights must be there in float32"
        yield Problem(f"{key}.lora_base_dtype", dtype, reason, "Write dtype: bfloat16 too, or leave it out")
    if model.adapter_path is not None:
        yield from _check_start(key, model, facts)
    elif model.trains_adapters:
        yield from _check_targets(f"{key}.lora_target_modules", model, facts)


def notes_on_targets(model: ModelConfig, facts: ModelFacts | None) -> Iterator[str]:
    """Note what adapters on all linear modules leave out, and a rank that gives nothing more."""
    if facts is not None and model.lora_rank and model.lora_target_modules == "all-linear":
        yield from notes_on_adapters(facts.families)
    adapted = {} if facts is None or model.adapter_path is not None else adapted_modules(model, facts)
    narrowest = min(adapted.items(), key=lambda item: min(item[1]), default=None)
    if narrowest is not None and model.lora_rank > min(narrowest[1]):
        name, shape = narrowest
        yield (
            f"lora_rank {model.lora_rank} is above the smaller side of {name} ({shape[0]} x {shape[1]}): beyond "
            f"{min(shape)} a rank adds parameters there and nothing that can be learned"
        )


def check_pushed(config: Config, shares: bool) -> Iterator[Problem]:
    """Check whether the engine can be sent what ``weight_sync.lora`` says; ``shares``: it is sent nothing."""
    chosen, engine = config.execution.weight_sync.lora, config.actor_rollout_ref.rollout.name
    adapted = config.actor_rollout_ref.model.trains_adapters
    if chosen == "adapter" and not adapted:
        reason = "all weights are trained, there is no adapter to send"
        yield Problem(SYNC, chosen, reason, "Leave it out, or write actor_rollout_ref.model.lora_rank: 16")
    elif chosen == "adapter" and engine in engines and not engine_capabilities(config).adapters:
        yield Problem(SYNC, chosen, f"the engine {engine} takes whole weights only", "Write merged")
    elif adapted and not shares and config.trainer.exact and pushed_part(config) == "merged":
        reason = "merged weights round otherwise than adapters beside them, and trainer.exact promises equal bits"
        yield Problem(SYNC, chosen, reason, "Write adapter, or trainer.exact: false")


def check_exported(trainer: TrainerConfig, model: ModelConfig) -> Iterator[Problem]:
    """Check whether there is an adapter to export where one is asked for."""
    if trainer.export == "adapter" and not model.trains_adapters:
        reason = "all weights are trained, so there is no adapter to write"
        yield Problem("trainer.export", "adapter", reason, "Write merged, or lora_rank: 16 in the model's section")


def _check_start(key: str, model: ModelConfig, facts: ModelFacts | None) -> Iterator[Problem]:
    """Check whether the folder that a run starts from holds adapters that can be trained, and nothing else contradicts
    it.
    """
    assert model.adapter_path is not None
    path, folder = f"{key}.adapter_path", Path(model.adapter_path).expanduser()
    if not (folder / ADAPTER).is_file():
        reason = f"there is no {ADAPTER} in it" if folder.is_dir() else "there is no such folder"
        yield Problem(path, model.adapter_path, reason, "Write a folder that PEFT's save_pretrained wrote")
        return
    found = read_adapter(folder)
    if found.config is None:
        yield Problem(path, model.adapter_path, f"its {ADAPTER} can't be read", "Save the adapter again")
        return
    if found.config.get("peft_type") != "LORA":
        reason = f"it holds {found.config.get('peft_type')}, and only LoRA can be trained"
        yield Problem(path, model.adapter_path, reason, "Write the folder of a LoRA adapter")
    elif (fault := fault_of_adapter(found.config)) is not None:
        yield Problem(
            path, model.adapter_path, f"its {ADAPTER} has {fault}", "Mend the file, or save the adapter again"
        )
    for name, plain in _PLAIN.items():
        if found.config.get(name) not in plain:
            reason = f"it was trained with {name} {found.config[name]!r}, which is more than LoRA's two matrices"
            yield Problem(path, model.adapter_path, reason, "Merge it into its model first, and start from that")
    families = () if facts is None else facts.families
    targets = found.config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if without_adapter(families, str(target)):
            reason = f"it adapts {target}, and the experts of the family {families[-1]} are no linear modules"
            yield Problem(path, model.adapter_path, reason, "Merge it into its model first, and start from that")
    if model.lora_rank not in (0, found.rank):
        reason = f"the adapter in {model.adapter_path} has the rank {found.rank}"
        yield Problem(f"{key}.lora_rank", model.lora_rank, reason, "Leave it out: the rank is the adapter's own")


def _check_targets(key: str, model: ModelConfig, facts: ModelFacts | None) -> Iterator[Problem]:
    """Check whether each target is a module of a layer, as far as the model's files say."""
    targets = model.lora_target_modules
    if not targets:
        yield Problem(key, [], "LoRA with no module to adapt trains nothing", "Write all-linear")
    if targets != "all-linear" and "all-linear" in targets:
        reason = "all-linear stands for every linear module of the layers, and is the name of none"
        yield Problem(key, targets, reason, "Write all-linear without brackets, or take it out of the list")
        return
    if targets == "all-linear" or facts is None or not facts.matrices:
        return
    able = adaptable(facts)
    known = sorted({name.rpartition(".")[2] for name in able if in_a_layer(name)})
    fused = next((family for family in facts.families if family in FUSED_EXPERTS), None)
    for index, target in enumerate(targets):
        modules = [name for name in able if is_target(name, target)]
        unfit = next((f for f in facts.families if target.rpartition(".")[2] in UNADAPTED.get(f, ())), None)
        joined = target.rpartition(".")[2] in FUSED_NAMES or any(is_target(name, target) for name in facts.matrices)
        if not modules and fused is not None and joined:
            reason = f"it means experts or their router, and those of the family {fused} are no linear modules"
            yield Problem(f"{key}[{index}]", target, reason, f"Take it out; modules of a layer: {', '.join(known)}")
        elif not modules and unfit is not None:
            reason = f"modules of the family {unfit} that are called so can't have an adapter"
            yield Problem(f"{key}[{index}]", target, reason, f"Take it out; modules of a layer: {', '.join(known)}")
        elif not modules:
            hint = near(target, known)
            yield Problem(f"{key}[{index}]", target, "the model has no such module", f"{hint[0].upper()}{hint[1:]}")
        elif outside := [name for name in modules if not in_a_layer(name)]:
            reason = f"{outside[0]} is outside the layers: an embedding or the head can't have an adapter"
            yield Problem(f"{key}[{index}]", target, reason, f"Take it out; modules of a layer: {', '.join(known)}")
