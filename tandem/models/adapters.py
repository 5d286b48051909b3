"""Adapters on a model, new ones or those in a folder of PEFT, and into such a folder again.

``peft.PeftModel.from_pretrained(base, folder)`` loads what is written here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.base.errors import DataError
from tandem.base.folders import whole_folder
from tandem.base.lazy import LazyModule
from tandem.base.manifest import write_manifest
from tandem.base.regular import regular
from tandem.models.adapter_spec import CONFIG, WEIGHTS, AdapterSpec
from tandem.models.folder.described import fault_of_adapter
from tandem.models.lora import adapted_layers, get_lora_model, hold_base, is_adapter

if TYPE_CHECKING:
    import peft
else:
    peft = LazyModule("peft")

_PREFIX = "base_model.model."


def with_adapters(model: PreTrainedModel, spec: AdapterSpec) -> peft.PeftModel:
    """Return ``model`` with the adapters of ``spec``; its layers are replaced, their weights cast where the spec says
    so.
    """
    if spec.path is None:
        targets = spec.target_modules
        adapted = get_lora_model(model, spec.rank, alpha=spec.alpha, target_modules=targets, seed=spec.seed)
        assert isinstance(adapted, peft.PeftModel)  # the rank is positive
    else:
        adapted = load_adapter(model, spec.path)
    hold_base(model, spec.base_dtype)
    return adapted


def save_adapter(
    weights: Mapping[str, torch.Tensor],
    spec: AdapterSpec,
    folder: Path,
    *,
    base: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write the adapter ``weights`` (names and full tensors of ``adapter_weights``); whole or not at all.

    ``base`` is the folder or hub id of the model that they belong to, for whoever loads them.
    """
    with whole_folder(folder) as scratch:
        scratch.mkdir(exist_ok=True)
        if spec.path is not None:
            shutil.copyfile(Path(spec.path) / CONFIG, scratch / CONFIG)
        else:
            _config_of(weights, spec, base).save_pretrained(str(scratch))
        save_file({peft_name(name): tensor.contiguous().cpu() for name, tensor in weights.items()}, scratch / WEIGHTS)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        write_manifest(scratch)


def _refuse_described(folder: str, file: Path) -> None:
    """Raise ``DataError`` for numbers that no adapter has; PEFT says what else is wrong with the file."""
    try:
        config = json.loads(regular(file).read_text("utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and (fault := fault_of_adapter(config)) is not None:
        raise DataError(f"adapter {folder!r}: its {CONFIG} has {fault}. Mend the file, or save the adapter again")


def load_adapter(model: PreTrainedModel, folder: str) -> peft.PeftModel:
    """Return ``model`` with the adapters in ``folder``, in float32 and ready to be trained; its layers are replaced.

    Raises ``DataError`` for a folder that holds none, or some that are not of this model.
    """
    place = Path(folder).expanduser()
    _refuse_described(folder, place / CONFIG)
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(place), is_trainable=True)
        with safe_open(place / WEIGHTS, framework="pt") as file:
            saved = set(file.keys())
    except Exception as error:  # whatever a broken folder provokes in peft: many types, none documented
        said = (str(error).splitlines() or ["no message"])[0]
        raise DataError(
            f"adapter {folder!r}: it could not be loaded onto the model ({type(error).__name__}: {said}). Write a "
            "folder that PEFT saved for this model"
        ) from error
    experts = [
        name for name, layer in adapted_layers(model).items() if isinstance(layer, peft.tuners.lora.layer.ParamWrapper)
    ]
    if experts:
        raise DataError(
            f"adapter {folder!r}: {experts[0]} is adapted, which is no linear module but the experts of a layer in "
            "one: merge it into its model first, and start from that"
        )
    own = {peft_name(name) for name in model.state_dict() if is_adapter(name)}
    if saved != own:
        odd = sorted(saved ^ own)[0]
        raise DataError(
            f"adapter {folder!r}: its weights are not those of its {CONFIG} on this model, {odd!r} is only in "
            f"{'its file' if odd in saved else 'the model'}. Write a folder that PEFT saved for this model"
        )
    for name, layer in adapted_layers(model).items():
        variants: Any = layer
        if variants.lora_variant or any(variants.lora_bias.values()):
            raise DataError(
                f"adapter {folder!r}: {name} has more than LoRA's two matrices; train it without DoRA or bias"
            )
    return adapted


def read_base(folder: Path) -> str:
    """Return the folder or hub id of the model that the adapters in ``folder`` belong to. Raises ``DataError``."""
    try:
        base: str | None = json.loads((folder / CONFIG).read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / CONFIG}: can't be read ({error})") from error
    if not base:
        raise DataError(f"{folder / CONFIG}: does not say which model the adapters belong to (base_model_name_or_path)")
    return base


def peft_name(name: str) -> str:
    """Return the name of an adapter's weight in PEFT's files: without the adapter's own name, below PEFT's prefix."""
    owner, weight, _, kind = name.rsplit(".", 3)
    return f"{_PREFIX}{owner}.{weight}.{kind}"


def _config_of(weights: Mapping[str, torch.Tensor], spec: AdapterSpec, base: str) -> peft.LoraConfig:
    adapted = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in weights})
    targets = adapted if spec.target_modules == "all-linear" else list(spec.target_modules)
    local = Path(base).expanduser()
    return peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=str(local.resolve()) if local.is_dir() else base,
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # a float is fine: it is only divided
        target_modules=targets,
        lora_dropout=0.0,
        inference_mode=True,
    )
