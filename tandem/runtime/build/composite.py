"""From the config to the composite node: model, actor, rollout engine, and the planned stages between them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from tandem.base.errors import ConfigError, ContractError, Problem
from tandem.config.model import ActorConfig, CriticConfig, ModelConfig
from tandem.config.model import ActorRolloutRef as Section
from tandem.config.schema import Config, DataConfig, SftDataConfig
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.adapters import with_adapters
from tandem.models.causal_lm import CausalLM
from tandem.models.chat_template import set_template
from tandem.models.loading import as_causal_lm, load_model
from tandem.models.numerics import prepare_process
from tandem.models.recording import routes_width
from tandem.models.token_ids import TokenIds
from tandem.models.tokenizer import check_vocabulary, load_tokenizer
from tandem.models.vision.images import freeze
from tandem.plan.own_loop import check_own_loop, unread_in_own_loop
from tandem.plan.parts.batch import name_epochs
from tandem.plan.parts.stages import columns_known
from tandem.plan.plan import Plan, compile_plan
from tandem.roles.actor import Actor
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.advantages import AdvantageStage
from tandem.roles.batching import Batching
from tandem.roles.critic import Critic
from tandem.roles.loss import policy_objective
from tandem.roles.rollout.generation import end_tokens, training_sampling
from tandem.roles.serving import Scorer
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.rollout.protocol import RolloutEngine
from tandem.rollout.registry import capabilities_of, make_engine
from tandem.runtime.build.engine_specs import engine_spec, run_device
from tandem.runtime.build.other_engine import other_engine
from tandem.runtime.build.stages import batch_stages, forward_models
from tandem.runtime.build.teachers import check_tokenizers, load_teachers, teacher_stage
from tandem.stages.facts import REF
from tandem.train.engine import FsdpEngine
from tandem.train.megatron.engine import MegatronEngine
from tandem.train.packed_engine import PackedEngine
from tandem.train.sharding import Traffic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerBase

S = TypeVar("S", Section, CriticConfig)


def build_actor_rollout_ref(section: Section | Config) -> ActorRolloutRef:
    """Build actor, rollout and reference for a training loop of your own, from ``config.actor_rollout_ref``.

    The other sections of the config that it came from (algorithm, seed, response length) hold too; a section made by
    hand takes their defaults. Warns of settings that such a loop does not read. Raises ``ConfigError`` with every
    problem of the sections that matter here.
    """
    config = config_around(section, Section, lambda made: Config(actor_rollout_ref=made), "config.actor_rollout_ref")
    plan = compile_plan(config, own_loop=True)
    problems = list(check_own_loop(config, plan))
    if problems:
        raise ConfigError(problems)
    for note in unread_in_own_loop(config):
        warnings.warn(note, stacklevel=2)
    if config.trainer.total_steps is not None:  # an epoch has a step at least; build_dataloader knows how many
        name_epochs(config, config.trainer.total_steps)
    updates = plan.batch.optimizer_steps_in_all
    tokenizer = model_tokenizer(config.actor_rollout_ref.model, config.data)
    composite = build_composite(config, plan, tokenizer, 1 if updates is None else updates)
    composite.start_engine = partial(other_engine, config)
    return composite


def config_around(section: S | Config, kind: type[S], around: Callable[[S], Config], wanted: str) -> Config:
    """Return the config that ``section`` is, or stands in, or that is put ``around`` one made by hand.

    Raises ``ContractError`` for anything else.
    """
    if isinstance(section, Config):
        return section
    if not isinstance(section, kind):
        raise ContractError(f"give {wanted} of a config from load_config(FILE), not {type(section).__name__}")
    return section.root if isinstance(section.root, Config) else around(section)


def model_tokenizer(model: ModelConfig, data: DataConfig | SftDataConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model, or the one named in its place, with the chat template that ``data`` asks for."""
    tokenizer = load_tokenizer(model.tokenizer, trust_remote_code=model.trust_remote_code)
    return set_template(tokenizer, data.chat_template, data.chat_template_kwargs)


def load_trainable(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> CausalLM:
    """Load the model as it is trained, with adapters where the config asks for them, which start from ``seed``."""
    plain = load_model(model.path, trust_remote_code=model.trust_remote_code)
    check_vocabulary(tokenizer, int(plain.get_input_embeddings().weight.shape[0]))  # type: ignore[index]
    freeze(plain, model.freeze)
    spec, tokens = AdapterSpec.of(model, seed), TokenIds.of(tokenizer)
    return as_causal_lm(plain if spec is None else with_adapters(plain, spec), dtype=model.dtype, tokens=tokens)


def build_composite(
    config: Config,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    total_updates: int,
    critic: Critic | None = None,
    scorer: Callable[..., Scorer] | None = None,
    engine: RolloutEngine | None = None,
    device: torch.device | None = None,
) -> ActorRolloutRef:
    """Build the composite node of ``plan``, the actor in this process; ``total_updates`` is where a falling learning
    rate ends.

    ``critic`` is built before, where one is deployed; without it its stages are left out. ``scorer`` (of ``Runtime``)
    makes teachers on devices of their own; without it they are beside the actor. ``engine`` has weights of its own;
    without it one generates with the actor's parameters. ``device`` of the actor; None: the first there is.
    """
    section, trainer = config.actor_rollout_ref, config.trainer
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    if engine is None:
        require_shared_weights(section.rollout.name)
    check_tokenizers(config, plan, tokenizer)
    model = load_trainable(section.model, tokenizer, trainer.seed)
    device = run_device(config.runtime) if device is None else device
    actor = build_actor(config, plan, model, total_updates, device)
    if engine is None:
        spec = engine_spec(config, "nothing", model.tokens, str(device))
        engine = make_engine(replace(spec, version=0), model, shares_weights=True)
    return assemble_composite(config, plan, tokenizer, model, actor, engine, critic, scorer)


def require_shared_weights(engine: str) -> None:
    """Raise ``ConfigError`` for an engine that can't generate with parameters that it shares."""
    capabilities = capabilities_of(engine)
    if capabilities is not None and "shared" not in capabilities.weights:
        reason = "it generates with weights of its own only, and this generates with the parameters that are trained"
        remedy = f"Write hf; in a loop of your own then call swap_rollout({engine!r}) on what this returns"
        raise ConfigError([Problem("actor_rollout_ref.rollout.name", engine, reason, remedy)])


def assemble_composite(
    config: Config,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    model: CausalLM,
    actor: Actor,
    engine: RolloutEngine,
    critic: Critic | None,
    scorer: Callable[..., Scorer] | None,
) -> ActorRolloutRef:
    """Join ``actor`` and ``engine``, wherever they are, to the composite node; ``model`` says what the actor trains."""
    section, trainer = config.actor_rollout_ref, config.trainer
    advantages, taught = AdvantageStage.of(config.algorithm, added=plan.step.token_rewards_given), None
    if plan.teachers:
        taught = teacher_stage(config, plan, load_teachers(config, plan, actor.ranks, scorer), model)
    models = () if scorer is None else forward_models(config, plan, scorer)
    return ActorRolloutRef(
        model=model,
        actor=actor,
        engine=engine,
        sampling=training_sampling(
            section.rollout,
            config.data.max_response_length,
            end_tokens(model.model, tokenizer),
            baseline="reward_baselines" in columns_known(plan.stages),
            vocabulary=model.head.size,
            routes=routes_width(model) if section.actor.router_replay else 0,
        ),
        tokenizer=tokenizer,
        advantages=advantages,
        stages=batch_stages(
            config, plan, actor, advantages, critic=critic, taught=taught, models=models, tokenizer=tokenizer
        ),
        objective=policy_objective(config),
        critic=critic,
        overlong=config.algorithm.overlong,
        models=models,
        seed=trainer.seed,
    )


def build_actor(config: Config, plan: Plan, model: CausalLM, total_updates: int, device: torch.device) -> Actor:
    """Build the actor of one rank in this process, on ``device``, with the tags of ``plan``."""
    engine = build_train_engine(config, model, total_updates, device)
    tag_device = config.actor_rollout_ref.actor.tag_device
    ranks = TrainGroup.in_process(engine, deadline_s=config.execution.deadline_s, tag_device=tag_device)
    return actor_of(config, plan, ranks)


def actor_of(config: Config, plan: Plan, ranks: TrainGroup[TrainRank]) -> Actor:
    """Build the actor over ``ranks``, wherever they are, with the tags of ``plan``."""
    epochs, batch = config.actor_rollout_ref.actor.ppo_epochs, plan.batch
    batching = Batching(batch.mini_batch_prompts, epochs, config.trainer.seed, batch.untrained_steps)
    return Actor(
        ranks,
        batching,
        keep_reference=REF in plan.tags,
        reference_is_base=REF in plan.base_tags,
        refresh_every=config.actor_rollout_ref.ref.update_interval if REF in plan.tags else None,
    )


def build_train_engine(
    config: Config, model: CausalLM, total_updates: int, device: torch.device, mesh: DeviceMesh | None = None
) -> PackedEngine:
    """Build what trains ``model`` on ``device`` as the config says; with a ``mesh``, as one of its ranks."""
    section = config.actor_rollout_ref
    sharded = partial(FsdpEngine, traffic=traffic_of(section.actor))
    engine: Callable[..., PackedEngine] = MegatronEngine if section.actor.strategy == "megatron" else sharded
    return engine(
        model,
        optim=section.actor.optim,
        total_updates=total_updates,
        max_tokens_per_micro_batch=section.actor.micro_batch_tokens,
        max_samples_per_micro_batch=section.actor.ppo_micro_batch_size,
        temperature=section.rollout.temperature,
        exact=config.trainer.exact,
        gradient_checkpointing=section.model.gradient_checkpointing,
        mesh=mesh,
        device=device,
    )


def traffic_of(actor: ActorConfig) -> Traffic:
    """Return what the actor's devices hand each other."""
    gathered, reduced = getattr(torch, actor.gather_dtype), getattr(torch, actor.reduce_dtype)
    return Traffic(gathered, reduced, once=actor.reduce_every == "mini_batch")
