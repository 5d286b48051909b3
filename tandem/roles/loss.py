"""A loss that isn't computed yet: a batch and what to do with it, so that the engine may run it in micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.config.schema import Config
from tandem.roles.critic import Critic
from tandem.train.objective import Distillation, Objective, PolicyObjective


@dataclass(frozen=True)
class Loss:
    """``batch``: complete samples, advantages included. ``objective``: the sum to minimise over them.

    ``critic``: to be trained on the same batch, before the actor. ``version``: the only weights that it can be trained
    with, because its old log-probs are to be theirs and no column holds them; None where it can be with any.
    """

    batch: DataProto
    objective: Objective
    critic: Critic | None = None
    version: int | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a Loss has no {name!r}: it isn't computed yet; give it to actor.step, which trains on it"
        )


def policy_objective(config: Config) -> PolicyObjective:
    """Return the objective that the config describes."""
    algorithm = config.algorithm
    norm = algorithm.loss_scale_factor
    in_loss, teaching = algorithm.kl.where == "loss", algorithm.distillation
    learned = teaching is not None and teaching.coef > 0
    return PolicyObjective(
        policy_loss=algorithm.policy_loss.type,
        parameters=algorithm.policy_loss.parameters,
        aggregation=algorithm.loss_agg_mode,
        norm=float(config.data.max_response_length) if norm is None else norm,
        kl_type=algorithm.kl.type,
        kl_coef=algorithm.kl.coef if in_loss else 0.0,
        entropy_coef=algorithm.entropy_coef,
        router_coef=config.actor_rollout_ref.actor.router_aux_loss_coef,
        old_from_rollout=algorithm.old_logprobs == "rollout",
        distillation=Distillation(teaching.type, teaching.parameters, teaching.coef, teaching.only)
        if teaching is not None and learned
        else None,
    )


def with_rewards(batch: DataProto, rewards: torch.Tensor, *, overlong: Literal["train", "mask"] = "train") -> DataProto:
    """Return the batch with its scores (B,); a score that is not finite takes its sample out of statistics and loss.

    ``overlong: mask`` takes answers out that were cut at their longest. Raises ``ContractError`` for scores of another
    shape, or that are no numbers.
    """
    if not isinstance(batch, DataProto):
        raise ContractError(f"rollout_outputs is a {type(batch).__name__}: give the batch that rollout() returned")
    try:
        rewards = torch.as_tensor(rewards).detach().to(torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ContractError(f"rewards can't be read as numbers ({error}): give one per sample, shape (B,)") from error
    if rewards.shape != (len(batch),):
        raise ContractError(
            f"rewards have shape {tuple(rewards.shape)}: give one number per sample, shape ({len(batch)},)"
        )
    valid = rewards.isfinite()
    if overlong == "mask":
        valid &= ~batch.dense("truncated")
    scored = DataProto(batch.batch, batch.non_tensor_batch, batch.meta_info, batch.tokenizer)
    scored.batch["rewards"] = rewards
    scored.batch["reward_valid"] = valid
    return without_samples(scored, ~valid)


def without_samples(batch: DataProto, excluded: torch.Tensor) -> DataProto:
    """Return ``excluded`` (B,) bool: samples that stay in the batch but count in no statistic and no loss."""
    if not bool(excluded.any()):
        return batch
    mask = batch.ragged("response_mask")
    kept = mask.values & ~excluded.repeat_interleave(mask.lengths)
    result = DataProto(batch.batch, batch.non_tensor_batch, batch.meta_info, batch.tokenizer)
    result.batch["response_mask"] = mask.like(kept)
    result.batch["reward_valid"] = batch.dense("reward_valid") & ~excluded
    return result
