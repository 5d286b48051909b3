"""What the rollout engine of a config can do, and how it holds its weights."""

from __future__ import annotations

from tandem.config.schema import Config
from tandem.rollout.capabilities import ANY_DEVICE, EngineCapabilities
from tandem.rollout.registry import capabilities_of, engines, wanted_settings

UNKNOWN = EngineCapabilities(
    weights=("shared", "own"),
    devices=(ANY_DEVICE,),
    in_flight=("abort", "keep"),
    keep_kv=("old", "recompute"),
    cancel=True,
    logprobs=("sampled", "full"),
    seeds=True,
    exact=True,
    images=True,
    routes=True,
)
"""What is planned with where the name is unknown: a problem says that it is, and nothing else is held against it."""


def engine_capabilities(config: Config) -> EngineCapabilities:
    """Return what the engine of the config declares that it can do."""
    declared = capabilities_of(config.actor_rollout_ref.rollout.name)
    return UNKNOWN if declared is None else declared


def after_swap(config: Config) -> Config:
    """Return the config as it is once the engine is swapped; the same one where none is."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.swap is None:
        return config
    changes = {"name": rollout.swap.name, "python": rollout.swap.python, "swap": None}
    section = config.actor_rollout_ref.model_copy(update={"rollout": rollout.model_copy(update=changes)})
    return config.model_copy(update={"actor_rollout_ref": section})


def shares_weights(config: Config, runtime: str) -> bool:
    """Return whether the rollout engine generates with the actor's own parameters: in one process with it, and as
    transformers lays them out.
    """
    one_process = config.execution.mode == "colocate" and runtime == "local"
    if config.actor_rollout_ref.actor.by_megatron:
        return False
    return one_process and "shared" in engine_capabilities(config).weights


def probe_interval(config: Config) -> int:
    """Say after how many versions each an engine's log-probs are compared with the trainer's."""
    proved = all(engine_capabilities(one).proof == "fingerprint" for one in (config, after_swap(config)))
    return config.execution.weight_sync.probe if proved else 1


def engine_width(config: Config) -> int:
    """Return the number of devices of one engine."""
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return width if engine_capabilities(config).tensor_parallel else 1


def engines_with(setting: str) -> list[str]:
    """Return the registered engines whose factories read a setting."""
    return [name for name in sorted(engines) if setting in wanted_settings(engines[name].target).names]


def engine_asks_for(config: Config, setting: str) -> bool:
    """Return whether the engine's factory reads a setting; taken to be so where that isn't known."""
    names = {one.actor_rollout_ref.rollout.name for one in (config, after_swap(config))}
    if not names <= {*engines}:
        return True
    wanted = [wanted_settings(engines[name].target) for name in names]
    return any(one.any or setting in one.names for one in wanted)
