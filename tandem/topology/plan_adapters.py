"""Which modules of a model get LoRA adapters and how many parameters those have, from the headers of its files."""

from __future__ import annotations

from tandem.config.model import ModelConfig
from tandem.topology.plan_model import ModelFacts

_USUAL_MATRICES = 7
"""Linear modules of a layer where the files don't say: four of the attention, three of the MLP."""


def adapted_modules(model: ModelConfig, facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """Module -> shape of its weight, for the modules that ``lora_target_modules`` names; a name may be a last part."""
    targets = model.lora_target_modules
    if targets == "all-linear":
        return {name: shape for name, shape in facts.matrices.items() if in_a_layer(name)}
    return {name: shape for name, shape in facts.matrices.items() if any(_named(name, t) for t in targets)}


def in_a_layer(module: str) -> bool:
    """Whether a module belongs to one of the layers, and so is neither an embedding nor the head."""
    return any(part.isdigit() for part in module.split("."))


def adapter_parameters(model: ModelConfig, facts: ModelFacts) -> int:
    """Parameters of all adapters: rank x (rows + columns) of each adapted matrix."""
    if not facts.matrices:
        assert facts.hidden and facts.layers  # an estimate is asked for only where sizes are known
        return model.lora_rank * 2 * facts.hidden * _USUAL_MATRICES * facts.layers
    return model.lora_rank * sum(map(sum, adapted_modules(model, facts).values()))


def _named(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
