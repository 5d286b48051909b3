"""What the parts of a run are made of in all modes, from one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config.schema import Config
from tandem.data.prompts import Prompt, PromptSource
from tandem.dataflow.dispatch import LengthHistory, longest_first
from tandem.dataflow.gate import Gate
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.spares import Spares
from tandem.observe.run_log import RunLog
from tandem.plan.plan import Plan
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.evaluation import Evaluator
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.filling import Filling
from tandem.roles.rollout.generation import evaluation_sampling
from tandem.roles.rollout.making import MakeGroups, Making, SingleAnswers
from tandem.roles.rollout.spare_groups import SpareGroups
from tandem.runtime.protocol import Runtime
from tandem.session.keep.exports import Exporter
from tandem.session.progress import Progress
from tandem.session.resume import run_info
from tandem.session.waits import Ranks, Waits
from tandem.stages.table import advantages
from tandem.train.checkpoint import Checkpoint


@dataclass(frozen=True)
class Parts:
    """The roles and facts that exist before a mode connects them.

    ``closing`` ends what was started for them; ``resumed`` is the checkpoint that the run goes on from; ``make`` turns
    prompts into groups, and ``lengths`` knows how long they became.
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
    make: MakeGroups = SingleAnswers
    lengths: LengthHistory = field(default_factory=LengthHistory)

    def gate(self, max_staleness: int, engines: Sequence[str], capacity: int | None = None) -> Gate:
        """Return a gate over the steps that are left, with engines that have loaded nothing yet."""
        prompts, progress, even = self.config.data.train_batch_size, self.progress, len(engines) > 1
        begun = prompts + self.config.actor_rollout_ref.rollout.oversample
        if capacity is not None:  # of groups that are kept, of which a partition has no more than without spare ones
            capacity = capacity if begun == prompts else capacity // prompts * begun
        gate = Gate(
            begun,
            max_staleness,
            first=progress.step,
            last=progress.last,
            even=even,
            capacity=capacity,
            order=self._order() if self.plan.longest_first else None,
        )
        for engine in engines:
            gate.join(engine)
        return gate

    def _order(self) -> Callable[[int], list[int]]:
        """Return what puts the tickets of a partition into the order of their expected lengths."""
        prompts, item_of = self.config.data.train_batch_size, self.source.item_of
        spare = range(prompts, prompts + self.config.actor_rollout_ref.rollout.oversample)
        order = longest_first(
            self.lengths.predicted, lambda partition, place: item_of(partition * prompts + place), prompts
        )
        return lambda partition: [*order(partition), *spare]

    def spares(self, gate: Gate) -> SpareGroups | None:
        """Return what takes the groups that are done first, where more are begun than a partition needs."""
        spare = self.config.actor_rollout_ref.rollout.oversample
        return SpareGroups(Spares(self.config.data.train_batch_size, spare), gate) if spare else None

    def ledger(self, partitions: int, capacity: int | None = None) -> Ledger:
        """Return the accounts of a data plane that holds so many partitions at once."""
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
        """Return how groups are drawn and which are kept."""
        algorithm = self.config.algorithm
        estimated = advantages.planned(self.plan.stages)
        return Filling(
            self.composite.sampling,
            self.config.trainer.seed,
            algorithm.filter_groups.enable,
            algorithm.overlong,
            self.config.execution.deadline_s,
            "reward_components" if estimated is not None and "reward_components" in estimated.needs else "rewards",
            self.lengths,
        )

    def making(self) -> Making:
        """Return what turns the tickets of one engine into groups."""
        return self.make(self.composite.sampling, self.composite.tokenizer)

    @property
    def output_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.config.trainer.output_dir).resolve()

    def open_log(self) -> RunLog:
        """Open the log of the run."""
        trainer = self.config.trainer
        info = run_info(trainer, self.config, self.progress.last, self.resumed)
        return RunLog(info, trainer.logger, trace=trainer.trace, samples=trainer.samples)

    def waits(self) -> Waits:
        """Return the waits of the actor's loop, in which its ranks are looked after."""
        execution = self.config.execution
        made = Waits(f"train_{self.plan.mode}", warning_s=execution.stall_warning_s, deadline_s=execution.deadline_s)
        critic = self.composite.critic
        groups = [self.composite.actor.ranks, *([] if critic is None else [critic.ranks])]
        made.watch(*(Ranks(group.check, group.silent) for group in groups))
        return made

    def evaluator(self) -> Evaluator | None:
        """Return the evaluation, where there are held-out prompts."""
        if not self.held_out:
            return None
        return build_evaluator(self.config, self.composite, self.held_out, self.rewards, self.make)

    def exporter(self) -> Exporter:
        """Return what writes the actor's model."""
        node, model = self.composite, self.config.actor_rollout_ref.model
        return Exporter(model, self.config.trainer, node.model, node.tokenizer, node.actor.export)


def build_evaluator(
    config: Config,
    composite: ActorRolloutRef,
    prompts: list[Prompt],
    rewards: RewardManager,
    make: MakeGroups = SingleAnswers,
) -> Evaluator:
    """Build the evaluation that the config describes, on the composite's engine."""
    return Evaluator(
        composite.engine,
        prompts,
        evaluation_sampling(config.evaluation, composite.sampling),
        rewards,
        composite.tokenizer,
        k=config.evaluation.k,
        seed=config.trainer.seed,
        make=make,
    )
