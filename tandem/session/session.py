"""What the loops of the modes are handed: parts, each of which does one thing, put together by ``build``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.config.schema import Config
from tandem.data.prompts import PromptSource
from tandem.dataflow.store import DataPlane
from tandem.plan.plan import Plan
from tandem.roles.actor import Actor
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.evaluation import Evaluator
from tandem.roles.reward import RewardManager
from tandem.roles.update import Slices
from tandem.session.rollout import RestingWorkers, SharedRollout, Workers
from tandem.session.run import Run
from tandem.session.samples import Samples
from tandem.session.serving import ServingRoles
from tandem.session.stage_table import StageTable
from tandem.session.weights import PushedWeights, SharedWeights
from tandem.train.objective import Objective

TimeShared = SharedRollout | RestingWorkers
"""Generation that takes turns with the actor."""

R = TypeVar("R")


@dataclass(frozen=True)
class Session(Generic[R]):
    """The parts of a run with rewards.

    ``run``: its steps, what is reported and saved of them. ``rollout``: who generates and scores. ``samples``:
    partitions, checked. ``stages``: what is done to them before the train call. ``weights``: how new ones get to
    the engines. The rest is what these are made of.
    """

    config: Config
    plan: Plan
    run: Run
    rollout: R
    samples: Samples
    stages: StageTable
    weights: SharedWeights | PushedWeights
    composite: ActorRolloutRef
    rewards: RewardManager
    evaluator: Evaluator | None
    plane: DataPlane
    source: PromptSource

    @property
    def actor(self) -> Actor:
        """The actor, who is trained."""
        return self.composite.actor

    @property
    def objective(self) -> Objective:
        """What the actor's step minimises."""
        return self.composite.objective


@dataclass(frozen=True)
class PipelinedSession(Session[Workers]):
    """``slices``: how a partition is trained part by part."""

    slices: Slices


@dataclass(frozen=True)
class ServedSession(Session[Workers]):
    """``roles`` give columns in loops of their own."""

    roles: ServingRoles
