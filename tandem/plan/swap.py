"""A run whose engine is another from some version of the weights on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.checks.engine import check_engine
from tandem.plan.parts.adapters import pushed_part
from tandem.plan.parts.engine import after_swap, shares_weights
from tandem.plan.parts.entries import Entries, unknown
from tandem.rollout.registry import engines

ROLLOUT = "actor_rollout_ref.rollout"
SWAP = f"{ROLLOUT}.swap"

_OTHER = {f"{ROLLOUT}.name": f"{SWAP}.name", f"{ROLLOUT}.python": f"{SWAP}.python"}
"""Where the other engine has keys of its own."""


def check_swap(config: Config, entries: Entries, runtime: str) -> Iterator[Problem]:
    """Yield every problem between the config and the engine that takes over, if there is one."""
    swap, steps = config.actor_rollout_ref.rollout.swap, config.trainer.total_steps
    if swap is None:
        return
    other = after_swap(config)
    if swap.name not in engines:
        yield unknown(f"{SWAP}.name", swap.name, "rollout engine", list(engines))
        return
    for one in (config, other):
        if shares_weights(one, runtime):
            name = one.actor_rollout_ref.rollout.name
            reason = f"in colocate on one device the engine {name} is the actor's own parameters, and stays"
            yield Problem(f"{SWAP}.name", swap.name, reason, "Write execution.mode: hybrid, or leave swap out")
            return
    known = {(problem.key, problem.reason) for problem in check_engine(config, entries, runtime)}
    for problem in check_engine(other, entries, runtime):
        if (problem.key, problem.reason) not in known:
            yield replace(problem, key=_OTHER.get(problem.key, problem.key))
    if pushed_part(config) != pushed_part(other):
        reason = f"of the engines {config.actor_rollout_ref.rollout.name} and {swap.name} one alone takes adapters"
        yield Problem("execution.weight_sync.lora", config.execution.weight_sync.lora, reason, "Write merged")
    if steps is not None and swap.step >= steps:
        yield Problem(f"{SWAP}.step", swap.step, f"the run has {steps} steps, the last is {steps - 1}", "Write less")
