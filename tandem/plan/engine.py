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
    logprobs=("sampled", "full"),
    seeds=True,
    exact=True,
)
"""What is planned with where the name is unknown: a problem says that it is, and nothing else is held against it."""


def engine_capabilities(config: Config) -> EngineCapabilities:
    """Return what the engine of the config declares that it can do."""
    declared = capabilities_of(config.actor_rollout_ref.rollout.name)
    return UNKNOWN if declared is None else declared


def shares_weights(config: Config, runtime: str) -> bool:
    """Return whether the rollout engine generates with the actor's own parameters: in one process with it."""
    one_process = config.execution.mode == "colocate" and runtime == "local"
    return one_process and "shared" in engine_capabilities(config).weights


def probe_interval(config: Config) -> int:
    """Say after how many versions each an engine's log-probs are compared with the trainer's."""
    proved = engine_capabilities(config).proof == "fingerprint"
    return config.execution.weight_sync.probe if proved else 1


def engine_width(config: Config) -> int:
    """Return the number of devices of one engine."""
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return width if engine_capabilities(config).tensor_parallel else 1


def engine_asks_for(config: Config, setting: str) -> bool:
    """Return whether the engine's factory reads a setting; taken to be so where that isn't known."""
    name = config.actor_rollout_ref.rollout.name
    if name not in engines:
        return True
    wanted = wanted_settings(engines[name].target)
    return wanted.any or setting in wanted.names
