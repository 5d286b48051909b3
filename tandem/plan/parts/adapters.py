"""Which modules of a model get LoRA adapters and how many parameters those have, from the headers of its files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.base.regular import regular
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.models.families import without_adapter
from tandem.plan.files.model import ModelFacts, shapes_in_files
from tandem.plan.parts.engine import engine_capabilities

ADAPTER = "adapter_config.json"
"""Marks a folder of PEFT."""

_USUAL_MATRICES = 7
"""Linear modules of a layer where the files don't say: four of the attention, three of the MLP."""


@dataclass(frozen=True)
class AdapterFacts:
    """What a folder of PEFT says of its adapter: ``config`` is all of it, None where that can't be read."""

    config: dict[str, Any] | None
    parameters: int

    @property
    def rank(self) -> int | None:
        """The rank of most adapted modules; None where the folder doesn't say."""
        found = (self.config or {}).get("r")
        return found if isinstance(found, int) else None

    @property
    def base(self) -> str | None:
        """The model that it was trained on."""
        found = (self.config or {}).get("base_model_name_or_path")
        return found if isinstance(found, str) and found else None


def read_adapter(folder: Path) -> AdapterFacts:
    """Read the config and the headers of the weights."""
    try:
        config = json.loads(regular(folder / ADAPTER).read_text("utf-8"))
    except (OSError, ValueError):
        config = None
    count = sum(math.prod(shape) for shape in shapes_in_files(folder).values())
    return AdapterFacts(config if isinstance(config, dict) else None, count)


def pushed_part(config: Config) -> Literal["merged", "adapter"]:
    """Return what a push to an engine with parameters of its own carries."""
    if not config.actor_rollout_ref.model.trains_adapters:
        return "merged"
    chosen = config.execution.weight_sync.lora
    if chosen is not None:
        return chosen
    return "adapter" if engine_capabilities(config).adapters else "merged"


def adapted_modules(model: ModelConfig, facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """Map each module to the shape of its weight, for the modules that ``lora_target_modules`` names; a name may be a
    last part.
    """
    targets, able = model.lora_target_modules, adaptable(facts)
    if targets == "all-linear":
        return {name: shape for name, shape in able.items() if in_a_layer(name)}
    return {name: shape for name, shape in able.items() if any(is_target(name, t) for t in targets)}


def adaptable(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """Map each module to the shape of its weight, for the matrices in the model's files that are modules once they are
    loaded.
    """
    return {name: shape for name, shape in facts.matrices.items() if not without_adapter(facts.families, name)}


def in_a_layer(module: str) -> bool:
    """Return whether a module belongs to one of the layers, and so is neither an embedding nor the head."""
    return any(part.isdigit() for part in module.split("."))


def adapter_parameters(model: ModelConfig, facts: ModelFacts) -> int:
    """Count the parameters of all adapters: rank x (rows + columns) of each adapted matrix."""
    if model.adapter_path is not None:
        return read_adapter(Path(model.adapter_path).expanduser()).parameters
    if not facts.matrices:
        assert facts.hidden and facts.layers  # an estimate is asked for only where sizes are known
        return model.lora_rank * 2 * facts.hidden * _USUAL_MATRICES * facts.layers
    return model.lora_rank * sum(map(sum, adapted_modules(model, facts).values()))


def is_target(module: str, target: str) -> bool:
    """Return whether ``target``, a name or the last part of one, means ``module``."""
    return module == target or module.endswith(f".{target}")
