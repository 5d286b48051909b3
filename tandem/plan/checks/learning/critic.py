"""Contradictions in the critic's section."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.plan.checks.model.adapters import check_adapters
from tandem.plan.checks.model.folder import check_files_of
from tandem.plan.checks.model.model import read_checked
from tandem.plan.checks.run.trainer import check_schedule
from tandem.plan.files.model import ModelFacts, model_folder, vocabulary_of
from tandem.plan.parts.batch import BatchPlan, longest_sequence
from tandem.plan.parts.critic import CriticPlan, critic_model, other_tokens, plan_critic

MODEL = "critic.model"


def read_critic(config: Config, actor: ModelFacts | None) -> tuple[ModelFacts | None, list[Problem]]:
    """Return ``read_checked`` of the critic's model; ``actor`` are the facts where it is the actor's."""
    own = config.critic.model
    return (actor, []) if own is None or not config.critic.enable else read_checked(MODEL, own, headed=True)


def check_critic(config: Config, batch: BatchPlan, facts: ModelFacts | None, own_loop: bool) -> Iterator[Problem]:
    """Yield every problem of the critic, if there is one; ``facts`` are those of its own model, if it has one.

    ``own_loop``: see ``check_schedule``.
    """
    planned = plan_critic(config)
    if planned is None:
        return
    if config.critic.model is not None:
        yield from check_files_of(MODEL, config.critic.model) if facts is not None else ()
        yield from check_adapters(MODEL, config.critic.model, facts)
        yield from _check_context(config, facts)
        yield from _check_tokens(config, config.critic.model)
    start = critic_model(config)
    if start.adapter_path is not None:
        reason = "a critic can't start from an adapter, which was trained for the head of a language model"
        remedy = f"Write critic.model: {{path: {start.path}, lora_rank: 16}}"
        yield Problem(f"{MODEL}.adapter_path", start.adapter_path, reason, remedy)
    yield from _check_budget(config, planned)
    yield from _check_exact(config)
    yield from _check_pipelining(config)
    yield from check_critic_schedule(config, batch, planned.epochs, own_loop)


def check_critic_schedule(config: Config, batch: BatchPlan, epochs: int, own_loop: bool = False) -> Iterator[Problem]:
    """Check what depends on the number of steps; ``epochs`` are the critic's."""
    yield from _check_warmup(config, batch)
    updates = None if batch.steps is None else batch.steps * batch.mini_batches * epochs
    yield from check_schedule("critic.optim", config.critic.optim, updates, own_loop)


def _check_context(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    longest, data = longest_sequence(config), config.data
    if facts is None or facts.context is None or facts.context.tokens >= longest:
        return
    reason = f"a sequence can have {longest} tokens with its prompt, and of {MODEL} {facts.context.why}"
    room = facts.context.tokens - data.max_prompt_length
    remedy = f"Name a {MODEL} of longer context" + (f", or write at most {room}" if room > 0 else "")
    yield Problem("data.max_response_length", data.max_response_length, reason, remedy)


def _check_tokens(config: Config, own: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of the critic's tokens, where both vocabularies can be read without loading a tokenizer."""
    folders = [model_folder(path) for path in (config.actor_rollout_ref.model.tokenizer, own.tokenizer)]
    actor, critic = (None if folder is None else vocabulary_of(folder) for folder in folders)
    problem = None if actor is None or critic is None else other_tokens(config, actor, critic)
    if problem is not None:
        yield problem


def _check_warmup(config: Config, batch: BatchPlan) -> Iterator[Problem]:
    steps, warmup = batch.steps, config.critic.warmup_steps
    if steps is not None and steps and warmup >= steps:
        reason = f"the run has {steps} steps, so that the actor would never be trained"
        yield Problem("critic.warmup_steps", warmup, reason, f"Write less than {steps}, or raise trainer.total_steps")


def _check_budget(config: Config, planned: CriticPlan) -> Iterator[Problem]:
    budget, longest = planned.max_tokens, longest_sequence(config)
    if config.critic.ppo_max_token_len_per_gpu is not None and budget < longest:
        reason = (
            f"one sequence can have {longest} tokens (data.max_prompt_length {config.data.max_prompt_length} + "
            f"data.max_response_length {config.data.max_response_length}), more than the token budget of a micro-batch"
        )
        yield Problem("critic.ppo_max_token_len_per_gpu", budget, reason, f"Write at least {longest}")


def _check_exact(config: Config) -> Iterator[Problem]:
    own = config.critic.model
    if config.trainer.exact and own is not None and own.dtype != "float32":
        reason = f"bit-equal runs are computed in float32, and {MODEL}.dtype is {own.dtype}"
        yield Problem("trainer.exact", True, reason, "Write dtype: float32, or exact: false")


def _check_pipelining(config: Config) -> Iterator[Problem]:
    execution = config.execution
    if execution.mode == "hybrid" and execution.train_pipelining != "off":
        reason = "the critic is trained once on the whole partition, between its values and the actor's update"
        yield Problem("execution.train_pipelining", execution.train_pipelining, reason, "Write off")
