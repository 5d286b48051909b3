"""From the config to the critic: its model, its engine, its group of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tandem.base.errors import ConfigError, Problem
from tandem.config.model import ActorRolloutRef, CriticConfig
from tandem.config.schema import AlgorithmConfig, Config
from tandem.models.numerics import prepare_process
from tandem.models.tokenizer import check_vocabulary, load_tokenizer
from tandem.models.value_model import ValueModel, load_value_model
from tandem.plan.files.model import model_folder
from tandem.plan.own_loop import NOT_FOR_A_LOOP
from tandem.plan.parts.critic import critic_model, other_tokens
from tandem.plan.plan import Plan, compile_plan
from tandem.roles.batching import Batching
from tandem.roles.critic import CRITIC, Critic
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.runtime.build.composite import config_around, model_tokenizer
from tandem.runtime.build.engine_specs import run_device
from tandem.train.value_engine import ValueEngine
from tandem.train.value_objective import ValueObjective

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def build_critic(section: CriticConfig | Config) -> Critic:
    """Build the critic for a training loop of your own, from ``config.critic``.

    The other sections of the config that it came from (model, mini-batches, seed, response length) hold too; a section
    made by hand needs a ``model`` and takes their defaults. ``compute_grpo_loss(..., critic=critic)`` asks it for
    values, and ``actor.step`` of that loss trains it as well. Raises ``ConfigError`` with every problem that matters
    here.
    """
    config = config_around(section, CriticConfig, _config_of, "config.critic")
    if not config.critic.enable:
        reason = "there is no critic to build"
        raise ConfigError([Problem("critic.enable", False, reason, "Write true, or build none")])
    plan = compile_plan(config, own_loop=True)
    problems = [problem for problem in plan.problems if problem.key.split(".")[0] not in NOT_FOR_A_LOOP]
    if problems:
        raise ConfigError(problems)
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    tokenizer = model_tokenizer(config.actor_rollout_ref.model, config.data)
    check_tokens(config, tokenizer)
    steps = 1 if plan.batch.steps is None else plan.batch.steps
    return local_critic(config, plan, tokenizer, steps, run_device(config.runtime))


def _config_of(section: CriticConfig) -> Config:
    """Return the smallest config around a section that was made by hand."""
    if section.model is None:
        reason = "this section belongs to no config, so there is no actor's model to start from"
        raise ConfigError([Problem("critic.model", None, reason, "Give it a model")])
    algorithm = AlgorithmConfig(adv_estimator="gae")
    return Config(actor_rollout_ref=ActorRolloutRef(model=section.model), critic=section, algorithm=algorithm)


def local_critic(
    config: Config, plan: Plan, tokenizer: PreTrainedTokenizerBase, steps: int, device: torch.device
) -> Critic:
    """Build the critic as one rank in this process, on ``device``; ``steps`` say where a falling learning rate ends."""
    model = critic_value_model(config, tokenizer)
    engine = value_engine(config, critic_training(plan, steps), model, device)
    ranks = TrainGroup.in_process(engine, deadline_s=config.execution.deadline_s, role=CRITIC)
    return critic_of(config, plan, model, ranks)


def critic_of(config: Config, plan: Plan, model: ValueModel, ranks: TrainGroup[TrainRank]) -> Critic:
    """Return the critic over ``ranks``, wherever they are."""
    section, norm = config.critic, config.algorithm.loss_scale_factor
    objective = ValueObjective(
        cliprange=float("inf") if section.cliprange_value is None else section.cliprange_value,
        aggregation=section.loss_agg_mode,
        norm=float(config.data.max_response_length) if norm is None else norm,
    )
    assert plan.critic is not None  # whoever asks has looked
    batching = Batching(plan.batch.mini_batch_prompts, plan.critic.epochs, config.trainer.seed)
    return Critic(model, ranks, batching, objective)


def critic_value_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> ValueModel:
    """Return the model that the critic starts from; the actor's tokens must be among its own."""
    model = load_value_model(critic_model(config))
    check_vocabulary(tokenizer, int(model.model.get_input_embeddings().weight.shape[0]))  # type: ignore[index]
    return model


class CriticTraining(NamedTuple):
    """What the engine of a critic takes from the plan: optimizer steps of the run, tokens of a micro-batch."""

    total_updates: int
    max_tokens: int


def critic_training(plan: Plan, steps: int) -> CriticTraining:
    """Return the training of the critic in a run of so many ``steps``."""
    assert plan.critic is not None  # whoever asks has looked
    return CriticTraining(max(1, steps * plan.batch.mini_batches * plan.critic.epochs), plan.critic.max_tokens)


def value_engine(
    config: Config, training: CriticTraining, model: ValueModel, device: torch.device, mesh: DeviceMesh | None = None
) -> ValueEngine:
    """Build the engine that trains the critic's ``model`` on ``device``; with a ``mesh``, as one of its ranks."""
    section = critic_model(config)
    return ValueEngine(
        model,
        optim=config.critic.optim,
        total_updates=training.total_updates,
        max_tokens_per_micro_batch=training.max_tokens,
        max_samples_per_micro_batch=config.actor_rollout_ref.actor.ppo_micro_batch_size,
        temperature=1.0,
        exact=config.trainer.exact,
        gradient_checkpointing=section.gradient_checkpointing,
        mesh=mesh,
        device=device,
    )


def check_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ConfigError`` where the critic's own tokenizer gives the actor's tokens other ids. Loads no model.

    The plan has looked already where a file says it. A folder without a tokenizer says nothing of its tokens; their
    number is checked when the model is loaded.
    """
    own = config.critic.model if config.critic.enable else None
    folder = None if own is None else model_folder(own.tokenizer)
    if own is None or folder is None or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return
    its = load_tokenizer(folder, trust_remote_code=own.trust_remote_code)
    problem = other_tokens(config, tokenizer.get_vocab(), its.get_vocab())
    if problem is not None:
        raise ConfigError([problem])
