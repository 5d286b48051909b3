"""The local runtime: every role in this process, rewards in processes of their own. No Ray."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.base.errors import ConfigError, DataError, Problem
from tandem.config.schema import Config
from tandem.dataflow.gate import Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.source import Prompt, PromptSource
from tandem.dataflow.store import LocalStore
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.evaluation import Evaluator
from tandem.roles.generation import evaluation_sampling
from tandem.roles.reward import RewardManager, build_reward_manager
from tandem.roles.rollout import Filling, Rollout
from tandem.topology.composite import build_composite, model_tokenizer
from tandem.topology.plan import Plan
from tandem.topology.session import CHECKPOINTS, Progress, Session
from tandem.topology.sources import held_out_prompts, prompt_source
from tandem.train import checkpoint
from tandem.train.checkpoint import Checkpoint

_ENGINE = "rollout-0"


def build_session(config: Config, plan: Plan) -> Session:
    """Start the roles of ``plan``. Data are read before the model: what is wrong with them costs seconds.

    Raises ``ConfigError`` where the plan has problems or names what can't run yet, ``DataError`` for bad rows.
    """
    plan.require_runnable()
    if config.runtime.torch_threads is not None:
        torch.set_num_threads(config.runtime.torch_threads)
    resumed = find_checkpoint(config)
    tokenizer = model_tokenizer(config.actor_rollout_ref.model)
    source = prompt_source(config, tokenizer)
    evaluated = config.evaluation.interval > 0 or config.evaluation.at_start
    held_out = held_out_prompts(config, tokenizer) if evaluated else []
    if evaluated and not held_out:
        raise DataError(
            "an evaluation is asked for, and there are no held-out prompts: name data.val_files, or turn it off"
        )
    progress = Progress(0, source.total_steps(config.data.train_batch_size, config.trainer.total_steps))
    if resumed is not None:
        _continue(progress, source, resumed)
    rewards = build_reward_manager(
        config.reward_manager, tokenizer=tokenizer, plugins=config.plugins, inline=config.runtime.threads
    )
    try:
        composite = build_composite(config, plan, tokenizer, progress.last * plan.batch.optimizer_steps)
        if resumed is not None:
            _restore(composite, resumed)
        return _connect(config, plan, composite, source, held_out, rewards, progress)
    except BaseException:
        rewards.close()
        raise


def _connect(
    config: Config,
    plan: Plan,
    composite: ActorRolloutRef,
    source: PromptSource,
    held_out: list[Prompt],
    rewards: RewardManager,
    progress: Progress,
) -> Session:
    """Plane, gate and the roles around the composite node."""
    prompts, output_dir = config.data.train_batch_size, Path(config.trainer.output_dir)
    gate = Gate(prompts, 0, first=progress.step, last=progress.last)
    gate.join(_ENGINE)
    ledger = Ledger(
        prompts,
        composite.sampling.n,
        capacity=prompts,
        max_draws=config.algorithm.filter_groups.max_draws,
        settled_by=("responses", "rewards"),
        first=progress.step,
    )
    deadline_s = config.execution.deadline_s
    plane = LocalStore(ledger, lease_seconds=deadline_s)
    filling = Filling(
        composite.sampling,
        config.trainer.seed,
        config.algorithm.filter_groups.enable,
        config.algorithm.overlong,
        deadline_s,
    )
    rollout = Rollout(_ENGINE, composite.engine, source, rewards, plane, gate, filling, composite.tokenizer)
    checkpoint.set_aside(output_dir / CHECKPOINTS, progress.step)
    resumed_step = progress.step if progress.step else None
    info = RunInfo(output_dir, progress.last, resumed_step, config.model_dump(mode="json", by_alias=True))
    return Session(
        config=config,
        plan=plan,
        composite=composite,
        rollout=rollout,
        rewards=rewards,
        evaluator=build_evaluator(config, composite, held_out, rewards) if held_out else None,
        plane=plane,
        gate=gate,
        source=source,
        log=RunLog(info, config.trainer.logger, trace=config.trainer.trace),
        progress=progress,
        max_staleness=0,
        output_dir=output_dir,
    )


def build_evaluator(
    config: Config, composite: ActorRolloutRef, prompts: list[Prompt], rewards: RewardManager
) -> Evaluator:
    """The evaluation that the config describes, on the composite's engine."""
    return Evaluator(
        composite.engine,
        prompts,
        evaluation_sampling(config.evaluation, composite.sampling),
        rewards,
        composite.tokenizer,
        k=config.evaluation.k,
        seed=config.trainer.seed,
    )


def find_checkpoint(config: Config) -> Checkpoint | None:
    """What ``trainer.resume`` names: the newest whole checkpoint for ``auto``, else that folder."""
    resume = config.trainer.resume
    if resume is None:
        return None
    root = Path(config.trainer.output_dir) / CHECKPOINTS
    if resume == "auto":
        return checkpoint.latest(root)
    return checkpoint.open_checkpoint(Path(resume))


def _continue(progress: Progress, source: PromptSource, saved: Checkpoint) -> None:
    """Put the run and its data where ``saved`` has them."""
    if saved.step > progress.last:
        reason = f"the checkpoint is of step {saved.step}, the run ends at step {progress.last}"
        raise ConfigError([Problem("trainer.resume", str(saved.path), reason, "Raise trainer.total_steps")])
    progress.step = saved.step
    source.load_state_dict(saved.read()["data"])


def _restore(composite: ActorRolloutRef, saved: Checkpoint) -> None:
    """Put model, optimizer, tags and controllers where ``saved`` has them."""
    facts, actor = saved.read(), composite.actor
    tensors = {"actor": actor.engine.state_dict(), "tags": actor.weights.state_dict()}
    saved.load_tensors(tensors)
    actor.engine.load_state_dict(tensors["actor"])
    actor.weights.load_state_dict(tensors["tags"])
    actor.steps, actor.updates = facts["actor"]["steps"], facts["actor"]["updates"]
    composite.advantages.load_state_dict(facts["kl"])
    saved.restore_random_state()
