"""Another rollout engine for a loop of one's own, beside the one that serves."""

from __future__ import annotations

from dataclasses import replace

from tandem.base.errors import ConfigError
from tandem.config.schema import Config
from tandem.plan.own_loop import check_own_loop
from tandem.plan.parts.engine import engine_capabilities, probe_interval
from tandem.plan.plan import compile_plan
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.probing import LogprobProbe
from tandem.roles.rollout.following import FollowingEngine
from tandem.rollout.host import build_engine
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import RolloutEngine
from tandem.rollout.registry import make_engine
from tandem.runtime.build.engine_specs import engine_spec, run_device
from tandem.runtime.build.snapshots import snapshots_of


def other_engine(config: Config, node: ActorRolloutRef, name: str, python: str | None) -> RolloutEngine:
    """Start the engine ``name``, in a process of the interpreter ``python``, that follows the actor of ``node``.

    Without ``python`` one that can generates with the actor's own parameters. Raises ``ConfigError`` where the config
    asks for something that the engine can't do.
    """
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"name": name, "python": python})
    section = config.actor_rollout_ref.model_copy(update={"rollout": rollout})
    chosen = config.model_copy(update={"actor_rollout_ref": section})
    plan = compile_plan(chosen, own_loop=True)
    problems = [
        *check_own_loop(chosen, plan),
        *(problem for problem in plan.problems if problem.key == "trainer.exact"),
    ]
    if problems:
        raise ConfigError(problems)
    device = str(run_device(chosen.runtime))
    spec = engine_spec(chosen, plan.pushed, node.model.tokens, device=device)
    if plan.pushed == "nothing":
        return make_engine(replace(spec, version=node.actor.steps), node.model, shares_weights=True)
    execution = chosen.execution
    if chosen.runtime.threads:
        engine: RolloutEngine = build_engine(spec)
    else:
        engine = ProcessEngine(name, spec, start_s=rollout.start_s, deadline_s=execution.deadline_s)
    return FollowingEngine(
        engine,
        snapshots_of(chosen, plan.pushed, node.actor),
        LogprobProbe.of(
            node.actor.ranks,
            node.tokenizer,
            longest=chosen.data.max_prompt_length,
            every=probe_interval(chosen),
            dtype=section.model.dtype,
        ),
        name=name,
        require_actor=node.actor.require_actor,
        logprobs=bool(engine_capabilities(chosen).logprobs),
        deadline_s=execution.weight_sync.deadline_s,
    )
