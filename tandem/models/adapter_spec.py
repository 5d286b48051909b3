"""Which adapters a model gets, as one value that can be sent to other processes. Importing this costs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.config.model import ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What PEFT calls the two files of a folder."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """LoRA of ``rank`` on ``target_modules``, its random half drawn from ``seed``; or what PEFT saved in ``path``.

    Weights of the layers that get adapters are held as ``base_dtype``.
    """

    rank: int = 0
    alpha: float = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    seed: int = 0
    path: str | None = None
    base_dtype: Literal["float32", "bfloat16"] = "float32"

    @classmethod
    def of(cls, model: ModelConfig, seed: int) -> AdapterSpec | None:
        """Return what the config asks for; None where all weights are trained."""
        if not model.trains_adapters:
            return None
        if model.adapter_path is not None:
            return cls(path=model.adapter_path, base_dtype=model.lora_base_dtype)
        targets = model.lora_target_modules
        return cls(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules="all-linear" if targets == "all-linear" else tuple(targets),
            seed=seed,
            base_dtype=model.lora_base_dtype,
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AdapterSpec:
        """Return what ``dataclasses.asdict`` and JSON made of one."""
        targets = fields["target_modules"]
        return cls(**{**fields, "target_modules": targets if isinstance(targets, str) else tuple(targets)})
