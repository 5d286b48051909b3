"""The composite node of the config: one model as actor, rollout and reference, behind one interface."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.models.causal_lm import CausalLM
from tandem.roles.actor import Actor
from tandem.roles.advantages import AdvantageStage
from tandem.roles.critic import Critic
from tandem.roles.loss import Loss, with_rewards
from tandem.roles.rollout.generation import as_batch, as_prompts, request
from tandem.roles.serving import ForwardModel
from tandem.rollout.protocol import RolloutEngine, Sampling
from tandem.stages.stage import BatchStage
from tandem.train.objective import Objective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class ActorRolloutRef:
    """Actor, rollout engine and reference over one set of weights, for a training loop of your own.

    ``stages`` are the forwards and the advantages that the plan derived from the config; ``objective`` is what
    ``actor.step`` minimises. ``critic`` is there where ``stages`` train one, ``models`` where roles
    score with weights of their own. ``calls`` counts rollouts, so that no two
    of them repeat their random streams.
    """

    model: CausalLM
    actor: Actor
    engine: RolloutEngine
    sampling: Sampling
    tokenizer: PreTrainedTokenizerBase
    advantages: AdvantageStage
    stages: tuple[BatchStage, ...]
    objective: Objective
    critic: Critic | None = None
    models: tuple[ForwardModel, ...] = ()
    seed: int = 0
    calls: int = 0

    def rollout(
        self, prompts: Iterable[object], *, temperature: float | None = None, top_p: float | None = None
    ) -> DataProto:
        """n samples of each prompt under the actor's weights of this moment, in the order of the prompts.

        ``prompts``: text, chat messages, token ids, or what a prompt source draws. ``temperature`` and ``top_p``
        replace the configured ones; samples of another temperature than the configured one are off-policy.
        """
        sampling = replace(
            self.sampling,
            temperature=self.sampling.temperature if temperature is None else temperature,
            top_p=self.sampling.top_p if top_p is None else top_p,
            baseline=False,
        )
        asked = as_prompts(prompts, self.tokenizer)
        self.engine.load(None, self.actor.steps)
        origin = (self.seed, "rollout", self.calls)
        requests = (request(i, prompt, sampling.n, *origin, i) for i, prompt in enumerate(asked))
        outputs = {int(output.request.key): output for output in self.engine.generate(requests, sampling)}
        self.calls += 1
        groups = [as_batch(prompt, outputs[i], i, self.tokenizer) for i, prompt in enumerate(asked)]
        return DataProto.concat(groups)


def compute_grpo_loss(
    rollout_outputs: DataProto,
    rewards: torch.Tensor,
    actor_rollout_ref: ActorRolloutRef,
    critic: Critic | None = None,
) -> Loss:
    """The configured policy loss on a scored batch, to be run by ``actor_rollout_ref.actor.step``.

    ``rewards`` (B,) float; a sample whose reward is not finite counts in no statistic and no loss. Runs the forwards
    that the config needs (reference, old policy, values) and the advantages; nothing else is computed before ``step``,
    which trains the ``critic`` too. Raises ``ContractError`` where the estimator needs values and there is no critic,
    unless the batch brings a column ``values``.
    """
    batch = with_rewards(rollout_outputs, rewards)
    if critic is not None:
        batch = critic.values(batch)
    elif "values" not in batch.batch and any("values" in stage.needs for stage in actor_rollout_ref.stages):
        raise ContractError(
            "the advantage estimator needs values: give critic=build_critic(config.critic), or a batch with a column "
            "'values'"
        )
    for stage in actor_rollout_ref.stages:
        batch = stage(batch)
    return Loss(batch, actor_rollout_ref.objective, critic)
