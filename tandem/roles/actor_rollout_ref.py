"""The composite node of the config: one model as actor, rollout and reference, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.models.causal_lm import CausalLM
from tandem.roles.actor import Actor
from tandem.roles.advantages import AdvantageStage
from tandem.roles.critic import Critic
from tandem.roles.loss import Loss, with_rewards
from tandem.roles.rollout.following import FollowingEngine
from tandem.roles.rollout.generation import as_batch, as_prompts, request
from tandem.roles.serving import ForwardModel
from tandem.rollout.protocol import RolloutEngine, Sampling
from tandem.rollout.sound import sound_outputs
from tandem.stages.stage import BatchStage
from tandem.train.objective import Objective, PolicyObjective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


StartEngine: TypeAlias = "Callable[[ActorRolloutRef, str, str | None], RolloutEngine]"
"""From the name of an engine and the interpreter of its environment, to one that follows the actor."""


@dataclass
class ActorRolloutRef:
    """Actor, rollout engine and reference over one set of weights, for a training loop of your own.

    ``stages`` are the forwards and the advantages that the plan derived from the config; ``objective`` is what
    ``actor.step`` minimises. ``critic`` is there where ``stages`` train one, ``models`` where roles score with weights
    of their own. ``overlong`` says what becomes of answers cut at their longest. ``calls`` counts rollouts, so that no
    two of them repeat their random streams. ``start_engine`` is for ``swap_rollout``.
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
    overlong: Literal["train", "mask"] = "train"
    models: tuple[ForwardModel, ...] = ()
    seed: int = 0
    calls: int = 0
    start_engine: StartEngine | None = None

    def rollout(
        self, prompts: Iterable[object], *, temperature: float | None = None, top_p: float | None = None
    ) -> DataProto:
        """Generate n samples of each prompt under the actor's weights of this moment, in the order of the prompts.

        ``prompts``: text, chat messages, token ids, or what a prompt source draws. ``temperature`` and ``top_p``
        replace the configured ones; samples of another temperature than the configured one are off-policy. At
        temperature 0 answers are greedy, and the n of a prompt are equal.
        """
        if temperature is not None and not (_is_number(temperature) and temperature >= 0):
            raise ContractError(f"rollout temperature = {temperature!r}: write above 0, or 0 for greedy answers")
        if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
            raise ContractError(f"rollout top_p = {top_p!r}: write above 0 and at most 1, which keeps all tokens")
        greedy = temperature == 0
        sampling = replace(
            self.sampling,
            temperature=self.sampling.temperature if temperature is None or greedy else temperature,
            greedy=greedy,
            top_p=self.sampling.top_p if top_p is None else top_p,
            baseline=False,
        )
        asked = as_prompts(prompts, self.tokenizer)
        self.engine.load(None, self.actor.steps)
        origin = (self.seed, "rollout", self.calls)
        requests = (request(i, prompt, sampling.n, *origin, i) for i, prompt in enumerate(asked))
        outputs = {int(output.request.key): output for output in sound_outputs(self.engine, requests, sampling)}
        self.calls += 1
        groups = [as_batch(prompt, outputs[i], i, self.tokenizer) for i, prompt in enumerate(asked)]
        return DataProto.concat(groups)

    def swap_rollout(self, name: str, *, python: str | None = None) -> None:
        """Generate with the engine ``name`` from here on; the others of its settings stay those of the config.

        ``python``: the interpreter of its environment. One that has weights of its own lives in another process, and
        gets the actor's at each ``rollout``. It serves once it has those of this moment and has answered the probe:
        until then, and where that fails, everything stays as it was. Raises ``ConfigError`` where the config asks for
        what the engine can't do.
        """
        if self.start_engine is None:
            raise ContractError(
                "this actor and its engines belong to a run: only a loop of one's own swaps its engine, on what "
                "build_actor_rollout_ref returned"
            )
        engine = self.start_engine(self, name, python)
        try:
            engine.load(None, self.actor.steps)
        except BaseException:
            _end(engine)
            raise
        old, self.engine = self.engine, engine
        _end(old)


def _end(engine: RolloutEngine) -> None:
    """End the process of an engine that has one."""
    if isinstance(engine, FollowingEngine):
        engine.close()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def compute_grpo_loss(
    rollout_outputs: DataProto,
    rewards: torch.Tensor,
    actor_rollout_ref: ActorRolloutRef,
    critic: Critic | None = None,
) -> Loss:
    """Return the configured policy loss on a scored batch, to be run by ``actor_rollout_ref.actor.step``.

    ``rewards`` (B,) float; a sample whose reward is not finite counts in no statistic and no loss. Runs the forwards
    that the config needs (reference, old policy, values) and the advantages; nothing else is computed before ``step``,
    which trains the ``critic`` too. A column ``old_logprobs`` or ``values`` that the batch brings is taken as it is.
    Raises ``ContractError`` where the estimator needs values and there is neither a critic nor the column, and for
    samples of weights that were trained since, where nothing tells their policy from the present one. Example::

        outputs = actor_rollout_ref.rollout(batch.prompts)
        loss = compute_grpo_loss(outputs, rewards=reward_manager(outputs), actor_rollout_ref=actor_rollout_ref)
        metrics = actor_rollout_ref.actor.step(loss)
    """
    node = actor_rollout_ref
    if not isinstance(node, ActorRolloutRef):
        raise ContractError(f"actor_rollout_ref is a {type(node).__name__}: give what build_actor_rollout_ref returned")
    batch = with_rewards(rollout_outputs, rewards, overlong=node.overlong)
    if critic is not None:
        batch = critic.values(batch)
    elif "values" not in batch.batch and any("values" in stage.needs for stage in node.stages):
        raise ContractError(
            "the advantage estimator needs values: give critic=build_critic(config.critic), or a batch with a column "
            "'values'"
        )
    brought = "old_logprobs" in batch.batch
    if not brought:
        _require_fresh(batch, node)
    for stage in node.stages:
        if not (brought and stage.name == "old"):
            batch = stage(batch)
    bound = _reads_old(node) and "old_logprobs" not in batch.batch
    return Loss(batch, node.objective, critic, node.actor.steps if bound else None)


def _reads_old(node: ActorRolloutRef) -> bool:
    return isinstance(node.objective, PolicyObjective) and node.objective.reads_old


def _require_fresh(batch: DataProto, node: ActorRolloutRef) -> None:
    """Refuse samples of other weights than the actor's, unless the engine's log-probs enter the loss.

    Else the first weights that see them would count as those that made them: every ratio would be 1.
    """
    read = {*node.objective.columns, *(name for stage in node.stages for name in stage.needs)}
    if "rollout_logprobs" in read or not _reads_old(node) or "token_versions" not in batch.batch or len(batch) == 0:
        return
    oldest = int(batch.ragged("token_versions").values.min()) if len(batch.ragged("token_versions").values) else 0
    if oldest < node.actor.moved:
        raise ContractError(
            f"these samples are of weights version {oldest}, and the actor was trained since (it is at "
            f"{node.actor.steps}): every ratio would start at 1 again. For several passes or mini-batches write "
            "actor_rollout_ref.actor.ppo_epochs and ppo_mini_batch_size, and call actor.step once. Samples that come "
            "late need algorithm.old_logprobs: rollout, or algorithm.rollout_correction; or give a column "
            "'old_logprobs' of your own"
        )
