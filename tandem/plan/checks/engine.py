"""Contradictions between what the config asks of the rollout engine and what that declares to be able to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.base.device_kinds import device_kind
from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.checks.learning.correction import cut_sampling, readers
from tandem.plan.checks.parameters import COLDEST
from tandem.plan.checks.samples.oversample import check_oversample
from tandem.plan.parts.dispatch import check_dispatch
from tandem.plan.parts.engine import engine_capabilities, shares_weights
from tandem.plan.parts.entries import Entries
from tandem.rollout.capabilities import ANY_DEVICE, Distribution
from tandem.rollout.interpreter import fault_of_interpreter

ROLLOUT = "actor_rollout_ref.rollout"


def check_engine(config: Config, entries: Entries, runtime: str) -> Iterator[Problem]:
    """Yield every problem between the rollout section and what the engine declares."""
    yield from _check_weights(config, runtime)
    yield from _check_process(config, runtime)
    yield from _check_update(config)
    yield from _check_temperature(config)
    yield from _check_logprobs(config, entries)
    yield from _check_exact(config)
    yield from check_dispatch(config)
    yield from check_oversample(config)


def engine_notes(config: Config, runtime: str) -> Iterator[str]:
    """Note what an engine leaves undone and a run can go on without."""
    rollout, capabilities = config.actor_rollout_ref.rollout, engine_capabilities(config)
    if not capabilities.seeds:
        yield f"the engine {rollout.name} takes no seeds: two runs with the same trainer.seed draw other samples"
    takes_turns = config.execution.mode == "colocate" and not shares_weights(config, runtime)
    if takes_turns and not capabilities.frees:
        yield f"the engine {rollout.name} frees nothing while the actor has its turn: both need memory at once"


def _declare(field: str, value: str) -> str:
    """Return how an engine of the user's says that it can."""
    return f"declare {field}=({value!r},) where it is registered, if it can"


def _check_weights(config: Config, runtime: str) -> Iterator[Problem]:
    """Check the place of the engine: with weights of its own it can be anywhere, sharing the trainer's only beside
    it.
    """
    name, capabilities = config.actor_rollout_ref.rollout.name, engine_capabilities(config)
    if "own" in capabilities.weights or shares_weights(config, runtime):
        return
    where = config.execution.mode if runtime == "local" else f"{config.execution.mode} on Ray"
    reason = f"it generates with the trainer's own parameters only, and in {where} an engine has weights of its own"
    remedy = f"Write execution.mode: colocate with one device a role, or hf; or {_declare('weights', 'own')}"
    yield Problem(f"{ROLLOUT}.name", name, reason, remedy)


def _check_process(config: Config, runtime: str) -> Iterator[Problem]:
    device, rollout = config.runtime.device, config.actor_rollout_ref.rollout
    capabilities = engine_capabilities(config)
    if device != "auto" and not {device, ANY_DEVICE} & {*capabilities.devices} and device_kind(device) is not None:
        reason = f"the engine {rollout.name} computes on {_listed(capabilities.devices)} only"
        yield Problem("runtime.device", device, reason, f"Write {capabilities.devices[0]}, or another engine")
    if rollout.python is None:
        return
    key, value = f"{ROLLOUT}.python", rollout.python
    if shares_weights(config, runtime):
        reason = f"in {config.execution.mode} the engine {rollout.name} lives in the trainer's process"
        yield Problem(key, value, reason, "Leave it out, or write execution.mode: hybrid")
    elif config.runtime.threads:
        yield Problem(key, value, "runtime.threads keeps the engine in this process", "Leave one of the two out")
    elif not (Path(value).is_file() and os.access(value, os.X_OK)):
        reason = "there is no such program"
        yield Problem(key, value, reason, "Write the python of the engine's environment, such as venv/bin/python")
    elif (fault := fault_of_interpreter(value, capabilities)) is not None:
        yield Problem(key, value, fault, "Write the python of an environment that has it (docs/engines.md)")


def _check_update(config: Config) -> Iterator[Problem]:
    """Check what running generations do when weights come."""
    rollout, capabilities = config.actor_rollout_ref.rollout, engine_capabilities(config)
    chosen = rollout.on_weight_update
    if config.execution.mode == "colocate" or chosen == "wait":
        return
    if chosen not in capabilities.in_flight:
        what = "end a running generation" if chosen == "abort" else "go on with a running generation over new weights"
        ways = ["wait", *capabilities.in_flight]
        remedy = f"Write {' or '.join(ways)}; or {_declare('in_flight', chosen)}"
        yield Problem(f"{ROLLOUT}.on_weight_update", chosen, f"the engine {rollout.name} can't {what}", remedy)
    elif chosen == "keep" and rollout.keep_kv not in capabilities.keep_kv:
        what = "keep old keys and values" if rollout.keep_kv == "old" else "compute keys and values again"
        remedy = f"Write {_listed(capabilities.keep_kv)}; or {_declare('keep_kv', rollout.keep_kv)}"
        yield Problem(f"{ROLLOUT}.keep_kv", rollout.keep_kv, f"the engine {rollout.name} can't {what}", remedy)


def _check_temperature(config: Config) -> Iterator[Problem]:
    rollout, lowest = config.actor_rollout_ref.rollout, engine_capabilities(config).lowest_temperature
    reason = f"the engine {rollout.name} draws at {lowest:g} or above"
    if COLDEST <= rollout.temperature < lowest:  # what is below is refused whatever the engine
        yield Problem(f"{ROLLOUT}.temperature", rollout.temperature, reason, f"Write {lowest:g} or more")
    if COLDEST <= config.evaluation.temperature < lowest:
        remedy = f"Write {lowest:g} or more, or 0 for greedy answers"
        yield Problem("evaluation.temperature", config.evaluation.temperature, reason, remedy)


def _check_logprobs(config: Config, entries: Entries) -> Iterator[Problem]:
    """Check whether it gives the log-probs that are asked for, or equal ones."""
    rollout, given = config.actor_rollout_ref.rollout, engine_capabilities(config).logprobs
    if not given:
        for key, value in list(readers(config, entries).items())[:1]:
            reason = f"the engine {rollout.name!r} gives no rollout log-probs, which this needs"
            yield Problem(key, value, reason, "Turn it off, or use an engine that gives them")
        return
    equal: set[Distribution] = {rollout.logprobs_of}
    if cut_sampling(config) is None:
        equal |= {"sampled", "full"}
    if rollout.temperature == 1.0 and "full" in equal:
        equal.add("raw")
    if not equal & set(given):
        what = {"sampled": "that tokens are drawn from", "full": "before top_p and top_k"}[rollout.logprobs_of]
        reason = f"the engine {rollout.name} gives no log-probs of the distribution {what}: {_listed(given)} only"
        yield Problem(f"{ROLLOUT}.logprobs_of", rollout.logprobs_of, reason, _same_distribution(given))


def _same_distribution(given: Sequence[str]) -> str:
    """Return the config in which the log-probs that are ``given`` are those that are asked for."""
    written = {"sampled": "sampled", "full": "full", "raw": "full with temperature: 1.0"}
    return "Write " + " or ".join(written[name] for name in given)


def _check_exact(config: Config) -> Iterator[Problem]:
    rollout, capabilities = config.actor_rollout_ref.rollout, engine_capabilities(config)
    if config.trainer.exact and not capabilities.exact:
        reason = f"the engine {rollout.name} doesn't promise the same bits whatever else it generates"
        yield Problem("trainer.exact", True, reason, "Write false, or an engine that declares exact=True, such as hf")


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names)
