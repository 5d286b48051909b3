"""From a plan to the parts of a run: data, rewards, a runtime, the roles on it, and what connects them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tandem.base.errors import DataError
from tandem.base.phases import phase
from tandem.config.schema import Config
from tandem.models.numerics import prepare_process
from tandem.observe.progress import shows_start
from tandem.plan.plan import Plan, check_counted
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.reward import build_reward_manager
from tandem.roles.rollout.making import SingleAnswers
from tandem.runtime.build.composite import model_tokenizer
from tandem.runtime.build.critic import check_tokens
from tandem.runtime.build.episodes import build_episodes
from tandem.runtime.build.sources import held_out_prompts, prompt_source, prompt_tables
from tandem.runtime.local import LocalRuntime
from tandem.runtime.protocol import Runtime
from tandem.runtime.ray.roles import RayRoles
from tandem.session.build.connect import connect_async, connect_resting, connect_shared, connect_streaming
from tandem.session.build.parts import Parts
from tandem.session.keep.moved_reference import require_reference
from tandem.session.progress import Progress
from tandem.session.resume import check_inputs, continue_from, find_checkpoint
from tandem.session.session import Session
from tandem.train.checkpoint import Checkpoint


@shows_start
def build_session(config: Config, plan: Plan) -> Session[Any]:
    """Start the roles of ``plan``. Data are read before the model: what is wrong with them costs seconds.

    Raises ``ConfigError`` where the plan has problems or names what can't run yet, ``DataError`` for bad rows.
    """
    plan.require_runnable()
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    check_inputs(config)
    resumed = find_checkpoint(config.trainer)
    if resumed is not None:
        require_reference(config, plan, resumed)
    tokenizer = model_tokenizer(config.actor_rollout_ref.model, config.data)
    check_tokens(config, tokenizer)
    with phase("reading the data"):
        tables = prompt_tables(config)
        source = prompt_source(config, tokenizer, tables)
    evaluated = config.evaluation.during_run
    held_out = held_out_prompts(config, tokenizer, tables) if evaluated else []
    if evaluated and not held_out:
        raise DataError(
            "an evaluation is asked for, and there are no held-out prompts: name data.val_files, or turn it off"
        )
    progress = Progress(0, source.total_steps(config.data.train_batch_size, config.trainer.total_steps))
    check_counted(config, plan, progress.last)
    if resumed is not None:
        continue_from(progress, source, config.data.train_batch_size, resumed)
    rewards = build_reward_manager(
        config.reward_manager, tokenizer=tokenizer, plugins=config.plugins, inline=config.runtime.threads
    )
    closing = ExitStack()
    closing.callback(rewards.close)
    episodes = build_episodes(config, tokenizer)
    if episodes is not None:
        closing.callback(episodes.close)
    try:
        with phase("starting engines"):
            runtime = RUNTIMES[plan.runtime](config, plan)
        closing.callback(runtime.close)
        with phase("loading the model"):
            composite = runtime.composite(tokenizer, progress.last)
        with phase("waiting for the scorers"):
            rewards.await_ready()  # loaded beside the model; what can't be made is told before anything is generated
        if episodes is not None:
            episodes.await_ready()
        if resumed is not None:
            _restore(composite, resumed)
        make = SingleAnswers if episodes is None else episodes
        parts = Parts(config, plan, runtime, composite, source, held_out, rewards, progress, closing, resumed, make)
        session = connect_shared(parts) if plan.pushed == "nothing" else CONNECTORS[plan.mode](parts)
        if resumed is not None:
            resumed.restore_random_state()  # last: what was built here has drawn
        return session
    except BaseException:
        closing.close()
        raise


RUNTIMES: dict[str, Callable[[Config, Plan], Runtime]] = {"local": LocalRuntime, "ray": RayRoles}

CONNECTORS: dict[str, Callable[[Parts], Session[Any]]] = {
    "colocate": connect_resting,
    "hybrid": connect_streaming,
    "fully_async": connect_async,
}
"""Mode -> what connects the roles where engines have weights of their own."""


def _restore(composite: ActorRolloutRef, saved: Checkpoint) -> None:
    """Put model, optimizer, tags and controllers where ``saved`` has them."""
    composite.actor.load(saved)
    if composite.critic is not None:
        composite.critic.load(saved)
    composite.advantages.load_state_dict(saved.read()["kl"])
