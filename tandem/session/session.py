"""The live handles of a run, built only from its plan, and what happens around each step."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.columns.proto import DataProto
from tandem.data.prompts import PromptSource
from tandem.dataflow.store import DataPlane
from tandem.models.loading import save_pretrained_atomic
from tandem.observe.metrics import RolloutRecord
from tandem.reward.outcome import share_scored
from tandem.roles.actor import Actor
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.advantages import AdvantageReport
from tandem.roles.batch_metrics import batch_metrics, check_lag
from tandem.roles.correction import mismatch_report
from tandem.roles.critic import CRITIC
from tandem.roles.evaluation import Evaluator
from tandem.roles.loss import Loss, without_samples
from tandem.roles.reward import RewardManager
from tandem.session.exports import Exporter
from tandem.session.stepping import CHECKPOINTS, Stepping
from tandem.speed.measured import RESUMED, setting_of, step_limit, step_summary
from tandem.stages.stage import BatchStage


class Tally(Protocol):
    """What the rollout role tells of itself: groups dropped by reason, and the scorer's own metrics."""

    counts: Counter[str]
    report: dict[str, float]


@dataclass(frozen=True)
class Session(Stepping):
    """Everything a control loop needs, by role. ``max_staleness`` is the bound that consumed data is held to."""

    composite: ActorRolloutRef
    rollout: Tally
    rewards: RewardManager
    evaluator: Evaluator | None
    plane: DataPlane
    source: PromptSource
    max_staleness: int

    @property
    def actor(self) -> Actor:
        """The role that is trained."""
        return self.composite.actor

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """The planned stages between the rewards and the train call."""
        return self.composite.stages

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The rollout engine's turn on the devices; what taking it and giving it back cost is a part of the step."""
        with self.log.timed("turns"):
            self._to_engine()
        yield
        with self.log.timed("turns"):
            self._to_actor()

    def _to_engine(self) -> None:
        self.composite.actor.sleep()
        self.composite.engine.wake()

    def _to_actor(self) -> None:
        self.composite.engine.sleep()
        self.composite.actor.wake()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around the answers of an evaluation, under the weights that were published last."""
        self._to_engine()
        yield
        self._to_actor()

    def group_columns(self) -> list[str]:
        """The columns that a group has once it is generated and scored."""
        filled = [stage for stage in self.plan.stages if stage.phase == "group"]
        return list(dict.fromkeys([*self.plan.source_columns, *(name for stage in filled for name in stage.gives)]))

    def take(self, partition: int) -> DataProto:
        """The sealed partition in canonical order, without the samples that count in nothing.

        Raises ``ContractError`` where a sample is staler than the run admits.
        """
        names = self.group_columns()
        lease = self.plane.take(
            "train",
            names,
            self.config.data.train_batch_size,
            timeout=self.config.execution.deadline_s,
            partition=partition,
            order="canonical",
            consumer="actor",
        )
        assert lease is not None  # each partition is taken once, whole
        batch = self.plane.get(lease.tickets, names)
        check_lag(batch, partition, self.max_staleness)
        self.plane.acknowledge(lease)
        batch.tokenizer = self.composite.tokenizer
        return without_samples(batch, ~batch.dense("reward_valid"))

    def train(self, batch: DataProto) -> dict[str, float]:
        """The train call on a complete batch."""
        return self.composite.actor.step(Loss(batch, self.composite.objective))

    @abstractmethod
    def publish(self, version: int) -> None:
        """Let everyone who generates go on under weights ``version``; the gate hears of it."""

    @abstractmethod
    def fill(self, partition: int) -> None:
        """Return once every ticket of the partition is filled, and it is sealed."""

    def end_step(self, step: int, batch: DataProto, update: dict[str, float]) -> None:
        """See ``Stepping.end_step``; the partition is freed."""
        self.plane.drop(step)
        super().end_step(step, batch, update)

    def _metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        report = self.rollout.report
        metrics = {
            **{f"reward/{name}": value for name, value in (report | share_scored(report)).items()},
            **batch_metrics(batch, step),
            **{f"dropped/{name}": float(count) for name, count in self.rollout.counts.items()},
            **self.told.metrics,
            **({} if self.composite.critic is None else self.composite.critic.metrics),
            **mismatch_report(batch, self.config.algorithm.correction),
        }
        self.rollout.counts.clear()
        return metrics

    def _samples(self, batch: DataProto, step: int) -> list[RolloutRecord]:
        return _records(batch, self.config.trainer.rollouts_per_step, step)

    def _times(self) -> dict[str, float]:
        """The parts of the finished step, the best possible step that they allow, and the fraction of it reached."""
        pushed = {f"time/push_{phase}": seconds for phase, seconds in self.progress.push.items()}
        times = self.log.drain() | self.progress.beside | pushed
        began = self.progress.began
        resumed = {RESUMED: float(began)} if 0 < began == self.progress.step - 1 else {}
        return times | step_limit(times, setting_of(self.config)) | resumed

    def _evaluation(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        with self.log.timed("evaluation"), self.evaluating():
            answers = self.evaluator.answers()
        return self.evaluator.metrics(answers)

    def save(self, step: int) -> None:
        """Write a checkpoint to resume from, with the model as a Hugging Face folder inside."""
        with self.log.timed("save"):
            root, keep = self.output_dir / CHECKPOINTS, self.config.trainer.keep_checkpoints
            self.composite.actor.save(root, step, facts=self.facts(), keep=keep, parts=self._parts(root, step))

    def _parts(self, root: Path, step: int) -> dict[str, Path]:
        """Folders that belong into the checkpoint of ``step`` under ``root``, written beside it, by name."""
        parts = self.exporter.write_parts(root)
        if self.composite.critic is not None:
            parts[CRITIC] = root / f".{CRITIC}.partial"
            self.composite.critic.save(parts[CRITIC], step)
        return parts

    @property
    def told(self) -> AdvantageReport:
        """What the advantages stage has to say of the last partition that was trained."""
        return self.composite.advantages.told()

    def facts(self) -> dict[str, Any]:
        """What a resumed run must know beside the actor."""
        return {
            "step": self.progress.step,
            "prompts": self.config.data.train_batch_size,
            "data": self.source.state_dict(rewind=self.source.drawn - self._trained_prompts()),
            "kl": self.told.state,
        }

    def _trained_prompts(self) -> int:
        """Draws of finished steps; what was drawn beyond them is generated again after a resume, and so never lost."""
        return self.progress.step * self.config.data.train_batch_size

    def finish(self) -> None:
        """Write what was trained as Hugging Face folders, or as an adapter, and settle the accounts.

        Raises ``ContractError`` where samples got lost, or count twice.
        """
        super().finish()
        critic = self.composite.critic
        if critic is not None:
            weights = dict(critic.export())
            save_pretrained_atomic(critic.model, self.composite.tokenizer, self.output_dir / CRITIC, weights=weights)
        accounts = self.plane.status().accounts
        accounts.check()
        self.progress.samples = str(accounts)

    @property
    def exporter(self) -> Exporter:
        """What writes the actor's model."""
        node, model = self.composite, self.config.actor_rollout_ref.model
        return Exporter(model, self.config.trainer, node.model, node.tokenizer, node.actor.export)

    def summary(self) -> dict[str, str]:
        """What the steps came to, and where all samples went."""
        done = self.progress.step > self.progress.began  # else what is there is of an earlier part of the run
        steps = step_summary(self.output_dir, setting_of(self.config)) if done else {}
        failures = self.rewards.failures
        told = {"samples": self.progress.samples, "rewards": str(failures) if failures.failed else ""}
        return steps | {name: text for name, text in told.items() if text}


def _records(batch: DataProto, count: int, version: int) -> list[RolloutRecord]:
    """The first samples of the first groups: one of each."""
    if not count:
        return []
    firsts = (batch.dense("sample_index") == 0).nonzero()[:count, 0].tolist()
    return [
        RolloutRecord(
            prompt=item.non_tensor_batch["prompt_text"],
            response=item.tokenizer.decode(item.batch["responses"]),
            reward=float(item.batch["rewards"]),
            ground_truth=item.non_tensor_batch["ground_truth"],
            version=version,
        )
        for item in (batch[row] for row in firsts)
    ]
