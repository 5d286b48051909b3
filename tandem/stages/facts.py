"""What a config makes of one step, decided once by the plan, and the names of those who do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.base.registry import Signature
from tandem.config.schema import Config
from tandem.episodes.built_in import SINGLE_TURN

ACTOR, CRITIC, ROLLOUT, REWARD = "actor", "critic", "rollout", "reward"
REFERENCE, ACTOR_FWD, ADVANTAGES, TEACHER = "reference", "actor_fwd", "advantages", "teacher"
"""Roles: the actor trains; the others of the second line are roles of their own in fully_async only, or where the
teacher can't be a tag."""

REF, OLD_ACTOR = "ref", "old_actor"
"""Tags: named copies of weights inside the actor."""

GIVEN = ("prompts", "responses", "response_mask")
"""Columns that every forward reads."""

RESTARTS = "restarts"
"""A column that every forward reads where rollouts give it."""

PROMPT_ROUTES, ROUTES = "prompt_routes", "routes"
"""Columns that forwards of the policy that sampled read where experts are replayed."""

COMPUTED_IN_TRAINING = ("logprobs", "entropies")
"""Arguments of a loss that the training forward makes; no column carries them."""

OldLogprobs = Literal["implied", "recompute", "rollout"]


@dataclass(frozen=True)
class Step:
    """The facts that stages decide by.

    ``apart``: each role has weights and a loop of its own (fully_async). ``generates``: answers are sampled and scored;
    else they are given, as preferences are. ``reference``: something compares with the reference policy.
    ``old_logprobs``: see ``plan.stages.old_logprobs_from``. ``teacher_columns`` and ``correction_columns`` are what is
    asked of the teacher and of the rollout correction, ``further_columns`` what stages of plug-ins give. Signatures are
    of what the config names; None where that is unknown (a problem says so), or where no reward is learned from.
    """

    config: Config
    apart: bool
    generates: bool
    learns_from_reward: bool
    reference: bool
    critic: bool
    old_logprobs: OldLogprobs
    keeps_old_actor: bool
    teacher_columns: tuple[str, ...]
    teacher_is_tag: bool
    correction_columns: tuple[str, ...]
    scorer: Signature | None
    estimator: Signature | None
    loss: Signature | None
    further_columns: tuple[str, ...] = ()

    @property
    def kl_in(self) -> Literal["off", "loss", "reward"]:
        """Where the KL to the reference is counted."""
        return self.config.algorithm.kl.where if self.generates and self.reference else "off"

    @property
    def token_rewards_given(self) -> bool:
        """Whether a stage of a plug-in, or the episode, gives rewards at tokens; that of the whole is added to them."""
        return "token_rewards" in self.further_columns or self.turns_rewarded

    @property
    def turns_rewarded(self) -> bool:
        """Whether rollouts bring rewards of single turns."""
        episode = self.config.actor_rollout_ref.rollout.episode
        return self.learns_from_reward and episode.type != SINGLE_TURN and episode.turn_rewards

    def estimator_reads(self, column: str) -> bool:
        """Return whether the advantage estimator can't do without ``column``."""
        return self.estimator is not None and column in self.estimator.columns

    def loss_reads(self, column: str) -> bool:
        """Return whether the policy or preference loss can't do without ``column``."""
        return self.loss is not None and column in self.loss.columns

    def role(self, name: str) -> str:
        """Return ``name`` where each role has a loop of its own, else the actor, who does it with a tag or between
        others.
        """
        return name if self.apart else ACTOR
