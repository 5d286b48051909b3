"""Which modules of a model get LoRA adapters and how many parameters those have, from the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tandem.base.errors import Problem
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.rollout.registry import engines
from tandem.topology.plan_model import ModelFacts

SYNC = "execution.weight_sync.lora"

_USUAL_MATRICES = 7
"""Linear modules of a layer where the files don't say: four of the attention, three of the MLP."""


def pushed_part(config: Config) -> Literal["merged", "adapter"]:
    """What a push to an engine with parameters of its own carries."""
    if not config.actor_rollout_ref.model.trains_adapters:
        return "merged"
    chosen = config.execution.weight_sync.lora
    if chosen is not None:
        return chosen
    return "adapter" if takes_adapters(config.actor_rollout_ref.rollout.name) else "merged"


def takes_adapters(engine: str) -> bool:
    """Whether the registered engine computes adapters beside its weights."""
    return engine in engines and bool(engines[engine].traits.get("adapters", False))


def check_pushed(config: Config) -> Iterator[Problem]:
    """Whether the engine can be sent what ``weight_sync.lora`` says."""
    chosen, engine = config.execution.weight_sync.lora, config.actor_rollout_ref.rollout.name
    adapted, streams = config.actor_rollout_ref.model.trains_adapters, config.execution.mode != "colocate"
    if chosen == "adapter" and not adapted:
        reason = "all weights are trained, there is no adapter to send"
        yield Problem(SYNC, chosen, reason, "Leave it out, or write actor_rollout_ref.model.lora_rank: 16")
    elif chosen == "adapter" and engine in engines and not takes_adapters(engine):
        yield Problem(SYNC, chosen, f"the engine {engine} takes whole weights only", "Write merged")
    elif adapted and streams and config.trainer.exact and pushed_part(config) == "merged":
        reason = "merged weights round otherwise than adapters beside them, and trainer.exact promises equal bits"
        yield Problem(SYNC, chosen, reason, "Write adapter, or trainer.exact: false")


def adapted_modules(model: ModelConfig, facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """Module -> shape of its weight, for the modules that ``lora_target_modules`` names; a name may be a last part."""
    targets = model.lora_target_modules
    if targets == "all-linear":
        return {name: shape for name, shape in facts.matrices.items() if in_a_layer(name)}
    return {name: shape for name, shape in facts.matrices.items() if any(is_target(name, t) for t in targets)}


def in_a_layer(module: str) -> bool:
    """Whether a module belongs to one of the layers, and so is neither an embedding nor the head."""
    return any(part.isdigit() for part in module.split("."))


def adapter_parameters(model: ModelConfig, facts: ModelFacts) -> int:
    """Parameters of all adapters: rank x (rows + columns) of each adapted matrix."""
    if not facts.matrices:
        assert facts.hidden and facts.layers  # an estimate is asked for only where sizes are known
        return model.lora_rank * 2 * facts.hidden * _USUAL_MATRICES * facts.layers
    return model.lora_rank * sum(map(sum, adapted_modules(model, facts).values()))


def is_target(module: str, target: str) -> bool:
    """Whether ``target``, a name or the last part of one, means ``module``."""
    return module == target or module.endswith(f".{target}")
