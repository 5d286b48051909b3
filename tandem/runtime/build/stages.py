"""The planned stages on live roles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tandem.columns.proto import DataProto
from tandem.config.schema import Config
from tandem.plan.plan import Plan
from tandem.roles.actor import Actor
from tandem.roles.advantages import AdvantageStage
from tandem.roles.correction import corrected
from tandem.roles.critic import Critic
from tandem.roles.serving import ForwardModel, Scorer
from tandem.roles.teachers import TeacherStage
from tandem.stages.facts import ACTOR, ACTOR_FWD, CRITIC, REFERENCE
from tandem.stages.stage import BatchStage, Roles, Run
from tandem.stages.table import bind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def batch_stages(
    config: Config,
    plan: Plan,
    actor: Actor,
    advantages: AdvantageStage,
    *,
    critic: Critic | None = None,
    taught: TeacherStage | None = None,
    models: tuple[ForwardModel, ...] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[BatchStage, ...]:
    """Return what the plan puts between the rewards and the train call, ready to run.

    Stages of roles that aren't given are left out; without ``models`` the actor's tags score in their place.
    """
    by_role = {model.name: model for model in models}
    reference, forward = by_role.get(REFERENCE), by_role.get(ACTOR_FWD)
    roles = Roles(
        config,
        plan.step,
        tokenizer,
        ref_logprobs=actor.ref_logprobs if reference is None else partial(reference.logprobs, column="ref_logprobs"),
        old_logprobs=actor.old_logprobs if forward is None else partial(_old_logprobs, forward),
        teacher=taught,
        values=None if critic is None else critic.values,
        train_critic=None if critic is None else _training(plan, actor, critic),
        correction=partial(corrected, config=config.algorithm.correction),
        advantages=advantages,
    )
    return bind(plan.stages, plan.table, roles)


def forward_models(config: Config, plan: Plan, scorer: Callable[..., Scorer]) -> tuple[ForwardModel, ...]:
    """Return the roles of ``plan`` that score with weights of their own and are sent new ones, as ``scorer`` makes
    them.

    Each is as the model was before training: version 0 until the first broadcast.
    """
    roles, interval = {stage.role for stage in plan.stages}, config.actor_rollout_ref.ref.update_interval
    every = {ACTOR_FWD: 1, REFERENCE: interval}
    return tuple(
        ForwardModel(name, scorer(name, moves=often is not None), version=0, every=often)
        for name, often in every.items()
        if name in roles
    )


def _old_logprobs(model: ForwardModel, batch: DataProto, squares: bool) -> DataProto:
    scored = model.logprobs(batch, "old_logprobs", squares=squares)
    return scored.union(DataProto({"old_version": torch.full((len(batch),), model.version, dtype=torch.int64)}))


def _training(plan: Plan, actor: Actor, critic: Critic) -> Run:
    """Yield while the critic trains; on devices that it shares with the actor, the memory for training is its own
    meanwhile.
    """
    group = {placement.role: placement.group for placement in plan.placements}
    if group[CRITIC] != group[ACTOR]:
        return critic.train

    def train(batch: DataProto) -> DataProto:
        actor.sleep()
        critic.wake()
        trained = critic.train(batch)
        critic.sleep()
        actor.wake()
        return trained

    return train
