"""What the sessions of all modes are made of, from one place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.config.schema import Config
from tandem.data.prompts import Prompt, PromptSource
from tandem.dataflow.gate import Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.store import DataPlane
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.plan.plan import Plan
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.evaluation import Evaluator
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.filling import Filling
from tandem.roles.rollout.generation import evaluation_sampling
from tandem.runtime.protocol import Runtime
from tandem.session.session import Session, Tally
from tandem.session.stepping import CHECKPOINTS, Progress
from tandem.stages.table import advantages
from tandem.train import checkpoint
from tandem.train.checkpoint import Checkpoint

S = TypeVar("S", bound=Session)


@dataclass(frozen=True)
class Parts:
    """The roles and facts that exist before a mode connects them.

    ``closing`` ends what was started for them; ``resumed`` is the checkpoint that the run goes on from.
    """

    config: Config
    plan: Plan
    runtime: Runtime
    composite: ActorRolloutRef
    source: PromptSource
    held_out: list[Prompt]
    rewards: RewardManager
    progress: Progress
    closing: ExitStack
    resumed: Checkpoint | None = None

    def gate(self, max_staleness: int, engines: Sequence[str]) -> Gate:
        """A gate over the steps that are left, with engines that have loaded nothing yet."""
        prompts, progress = self.config.data.train_batch_size, self.progress
        gate = Gate(prompts, max_staleness, first=progress.step, last=progress.last, even=len(engines) > 1)
        for engine in engines:
            gate.join(engine)
        return gate

    def ledger(self, partitions: int, capacity: int | None = None) -> Ledger:
        """The accounts of a data plane that holds so many partitions at once."""
        prompts = self.config.data.train_batch_size
        return Ledger(
            prompts,
            self.composite.sampling.n,
            capacity=prompts * partitions if capacity is None else capacity,
            max_draws=self.config.algorithm.filter_groups.max_draws,
            settled_by=("responses", "rewards"),
            first=self.progress.step,
        )

    def filling(self) -> Filling:
        """How groups are drawn and which are kept."""
        algorithm = self.config.algorithm
        estimated = advantages.planned(self.plan.stages)
        return Filling(
            self.composite.sampling,
            self.config.trainer.seed,
            algorithm.filter_groups.enable,
            algorithm.overlong,
            self.config.execution.deadline_s,
            "reward_components" if estimated is not None and "reward_components" in estimated.needs else "rewards",
        )

    def session(self, kind: type[S], rollout: Tally, plane: DataPlane, max_staleness: int, **handles: Any) -> S:
        """The handles that every loop needs, and those of this ``kind`` of session."""
        config, progress = self.config, self.progress
        output_dir = Path(config.trainer.output_dir).resolve()
        checkpoint.set_aside(output_dir / CHECKPOINTS, progress.step)
        resumed_step = progress.step if progress.step else None
        info = RunInfo(output_dir, progress.last, resumed_step, config.model_dump(mode="json", by_alias=True))
        return kind(
            config=config,
            plan=self.plan,
            composite=self.composite,
            rollout=rollout,
            rewards=self.rewards,
            evaluator=build_evaluator(config, self.composite, self.held_out, self.rewards) if self.held_out else None,
            plane=plane,
            source=self.source,
            log=RunLog(info, config.trainer.logger, trace=config.trainer.trace),
            progress=progress,
            max_staleness=max_staleness,
            output_dir=output_dir,
            closing=self.closing,
            **handles,
        )


def build_evaluator(
    config: Config, composite: ActorRolloutRef, prompts: list[Prompt], rewards: RewardManager
) -> Evaluator:
    """The evaluation that the config describes, on the composite's engine."""
    return Evaluator(
        composite.engine,
        prompts,
        evaluation_sampling(config.evaluation, composite.sampling),
        rewards,
        composite.tokenizer,
        k=config.evaluation.k,
        seed=config.trainer.seed,
    )
