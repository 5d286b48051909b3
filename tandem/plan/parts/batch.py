"""Batch arithmetic: from prompts per step to optimizer steps. All of it integers, nothing of it from the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.config.schema import Config
from tandem.plan.parts.critic import untrained_steps
from tandem.plan.parts.flow import plan_flow
from tandem.plan.parts.preference import samples_per_prompt


@dataclass(frozen=True)
class BatchPlan:
    """One partition. Prompts and samples are counts over all devices.

    ``micro_batches`` is the most that one optimizer step can need on one device, with every sequence at its longest.
    ``steps`` is None where only the data bound them. Optimizer steps are the actor's, who makes none in the first
    ``untrained_steps`` steps, which are a critic's alone.
    """

    prompts: int
    samples: int
    sub_batches: int
    sub_batch_prompts: int
    mini_batches: int
    mini_batch_prompts: int
    mini_batch_samples: int
    micro_batches: int
    optimizer_steps: int
    steps: int | None
    optimizer_steps_in_all: int | None
    untrained_steps: int

    def optimizer_steps_of(self, steps: int) -> int:
        """Count the optimizer steps of the actor in a run of so many steps."""
        return max(0, steps - self.untrained_steps) * self.optimizer_steps


def mini_batch_prompts(config: Config) -> int:
    """Return the prompts per optimizer step, whichever way the config writes it."""
    actor = config.actor_rollout_ref.actor
    if actor.ppo_mini_batch_size is not None:
        return actor.ppo_mini_batch_size
    if actor.global_batch_size is not None:
        return max(1, actor.global_batch_size // samples_per_prompt(config))
    flow = plan_flow(config)
    return max(1, config.data.train_batch_size // flow.sub_batches) if flow.old_actor else config.data.train_batch_size


def longest_sequence(config: Config) -> int:
    """Count the tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_length + config.data.max_response_length


def plan_batch(config: Config, train_ranks: int, rows: int | None) -> BatchPlan:
    """Return the arithmetic of one partition; ``rows`` are the training prompts of one epoch, where they could be
    counted.
    """
    prompts, n = config.data.train_batch_size, samples_per_prompt(config)
    mini = mini_batch_prompts(config)
    actor = config.actor_rollout_ref.actor
    mini_batches = max(1, prompts // mini)
    per_rank = math.ceil(mini * n / max(1, train_ranks))
    at_once = max(1, actor.micro_batch_tokens // longest_sequence(config))
    if actor.ppo_micro_batch_size is not None:
        at_once = min(at_once, actor.ppo_micro_batch_size)
    optimizer_steps = actor.ppo_epochs * mini_batches
    steps, untrained = total_steps(config, rows), untrained_steps(config)
    parts = plan_flow(config).sub_batches
    return BatchPlan(
        prompts=prompts,
        samples=prompts * n,
        sub_batches=parts,
        sub_batch_prompts=prompts // parts,
        mini_batches=mini_batches,
        mini_batch_prompts=mini,
        mini_batch_samples=mini * n,
        micro_batches=math.ceil(per_rank / at_once),
        optimizer_steps=optimizer_steps,
        steps=steps,
        optimizer_steps_in_all=None if steps is None else max(0, steps - untrained) * optimizer_steps,
        untrained_steps=untrained,
    )


def epochs(config: Config) -> int | None:
    """Return the passes over the data: one where nothing bounds the run, without bound where only steps do."""
    trainer = config.trainer
    passes, steps = trainer.total_epochs, trainer.total_steps
    if passes is not None and "total_epochs" in trainer.model_fields_set:
        return passes
    return 1 if steps is None else None


def name_epochs(config: Config, most: int) -> None:
    """Make ``most`` the ``total_epochs`` where ``total_steps`` alone bounds the run, for a user's loop over them.

    It is not written, so ``epochs`` and what is planned stay as they are.
    """
    if epochs(config) is None:
        config.trainer.model_fields_set.discard("total_epochs")
        config.trainer.__dict__["total_epochs"] = most


def total_steps(config: Config, rows: int | None) -> int | None:
    """Count the steps of the run: epochs are joined end to end, what is left of the last batch makes none."""
    passes = epochs(config)
    if passes is None:
        return config.trainer.total_steps
    if rows is None:
        return None
    from_data = passes * rows // config.data.train_batch_size
    return from_data if config.trainer.total_steps is None else min(from_data, config.trainer.total_steps)
