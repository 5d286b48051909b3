"""Partitions as the actor's loop takes them: whole groups, checked for their lag, what counts in nothing masked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.columns.images import IMAGES
from tandem.columns.proto import DataProto
from tandem.data.prompts import PromptSource
from tandem.dataflow.partition import Order
from tandem.dataflow.progress import Accounts, PartitionStatus
from tandem.dataflow.store import DataPlane, Monitored
from tandem.dataflow.tickets import Lease, Request
from tandem.observe.metrics import RolloutRecord
from tandem.observe.run_log import RunLog
from tandem.observe.status.status import PartitionLine, Status, Wait
from tandem.roles.batch_metrics import batch_metrics, check_lag, distributions
from tandem.roles.loss import without_samples
from tandem.session.progress import Progress, StepPart
from tandem.session.waits import Waits
from tandem.stages.facts import ACTOR
from tandem.stages.table import train

NOTHING = Accounts(0, 0, 0, {})
_ACCOUNTS = "samples"  # in the facts of a checkpoint
_ANSWER_S = 2.0  # for the parts of the data plane to give a sign of life
_LONGEST = 4  # open tickets that a status names
_TICK_S = 0.5  # between looks at the others while waiting for data


class Scored(Protocol):
    """Something that has the samples scored. ``Workers`` and ``SharedRollout`` are such."""

    def require_rewards(self, partition: int) -> None:
        """Raise ``RewardError`` where not one sample of the partition could be scored."""


def partition_line(found: PartitionStatus) -> PartitionLine:
    """Return what a status says of a partition."""
    longest = sorted(found.open, key=lambda entry: -entry.seconds)
    return PartitionLine(
        found.partition,
        found.tickets,
        found.filled,
        sum(entry.engine is not None for entry in found.open),
        sum(bool(entry.lacking) for entry in found.open),
        found.sealed,
        {name: [task.acked, task.leased, task.ready] for name, task in found.tasks.items()},
        dict(found.drops),
        [entry.describe() for entry in longest[:_LONGEST]],
    )


def accounts_before(facts: Mapping[str, Any]) -> Accounts:
    """Return where the samples went of the run whose checkpoint has these ``facts``, up to there."""
    return Accounts(**facts[_ACCOUNTS]).ended() if _ACCOUNTS in facts else NOTHING


@dataclass(frozen=True)
class Samples(StepPart):
    """The data plane on the side of the actor's loop. A partition of ``prompts`` groups is taken once.

    ``columns`` are those that a group brings; in fully async also what the roles beside the loop give. A partition
    comes in ``sub_batches`` parts, in the given ``order`` of its groups. ``max_staleness`` is the bound that consumed
    data are held to. ``beside``: partitions are filled beside the loop, and not by it. ``recorded``: samples of a step
    that are written down. ``before`` are the accounts of the parts of the run that this one goes on from.
    """

    plane: DataPlane
    source: PromptSource
    rollout: Scored
    waits: Waits
    log: RunLog
    progress: Progress
    tokenizer: Any
    columns: Sequence[str]
    prompts: int
    sub_batches: int = 1
    order: Order = "arrival"
    max_staleness: int = 0
    beside: bool = False
    recorded: int = 0
    before: Accounts = NOTHING

    def arriving(self, partition: int) -> Iterator[DataProto]:
        """Yield the parts of ``partition``, each once it has its columns.

        Raises ``RewardError`` after the last one where not one sample has a reward.
        """
        for index in range(self.sub_batches):
            yield from self._taken(partition, index, self.prompts // self.sub_batches, self.order)
        self.rollout.require_rewards(partition)

    def complete(self, partition: int) -> DataProto:
        """Return the whole of ``partition`` in canonical order. Raises ``RewardError`` where not one sample has a
        reward.
        """
        (batch,) = self._taken(partition, 0, self.prompts, "canonical")
        self.rollout.require_rewards(partition)
        return batch

    def _taken(self, partition: int, index: int, count: int, order: Order) -> Iterator[DataProto]:
        """Yield the next ``count`` groups, acknowledged once the loop has worked on them.

        Raises ``ContractError`` where a sample is staler than the run admits.
        """
        lease = self.next_groups(partition, index, count, order)
        with self.waits.stall_warning(
            f"(rollout_id={partition}) batch_index={index}", lambda: self.waits.causes(partition)
        ):
            batch = self.plane.get(lease.tickets, self.columns)
        check_lag(batch, partition, self.max_staleness)
        batch.tokenizer = self.tokenizer
        yield without_samples(batch, ~batch.dense("reward_valid"))
        self.plane.acknowledge(lease)

    def next_groups(self, partition: int, index: int, count: int, order: Order) -> Lease:
        """Wait for so many groups. The time of it is reported where they are filled beside the loop."""

        request = Request(train.name, self.columns, count, partition, order, consumer=ACTOR)

        def take() -> Lease:
            lease = self.plane.take(request, timeout=_TICK_S)
            assert lease is not None  # a partition is taken once
            return lease

        with self.log.timed("wait") if self.beside else nullcontext():
            return self.waits.until(take, partition, index)

    # --- around a step -----------------------------------------------------------------------------------------------

    def end_step(self, step: int) -> None:
        with self.waits.stall_warning(f"(rollout_id={step}) dropping its samples", lambda: self.waits.causes(step)):
            self.plane.drop(step)

    def metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        return batch_metrics(batch, step)

    def records(self, batch: DataProto, step: int) -> list[RolloutRecord]:
        """Return the first samples of the first groups: one of each."""
        if not self.recorded:
            return []
        firsts = (batch.dense("sample_index") == 0).nonzero()[: self.recorded, 0].tolist()
        return [
            RolloutRecord(
                prompt=item.non_tensor_batch["prompt_text"],
                response=item.tokenizer.decode(item.batch["responses"]),
                reward=float(item.batch["rewards"]),
                ground_truth=item.non_tensor_batch["ground_truth"],
                version=min(item.batch["token_versions"].tolist(), default=step),
                version_max=max(item.batch["token_versions"].tolist(), default=step),
                messages=item.non_tensor_batch.get("episode", {}).get("messages"),
                turn_rewards=item.non_tensor_batch.get("episode", {}).get("turn_rewards"),
                images=getattr(item.non_tensor_batch.get(IMAGES), "urls", None),
            )
            for item in (batch[row] for row in firsts)
        ]

    def logged(self, batch: DataProto, step: int) -> None:
        """Keep all samples of the step, and show how they are spread, where that is asked for."""
        self.log.keep_samples("train", step + 1, batch)
        self.log.distributions(step + 1, lambda: distributions(batch))

    def facts(self, step: int) -> dict[str, Any]:
        """Return where the data stand: what was drawn for later steps is generated again after a resume, and so not
        lost.
        """
        return {
            "prompts": self.prompts,
            "data": self.source.state_dict(rewind=self.source.drawn - step * self.prompts),
            _ACCOUNTS: asdict(self.before + self.plane.status().accounts),
        }

    def report_status(self, status: Status) -> None:
        """Add the partitions, and what the actor's loop waits for."""
        silent = self.plane.silent(_ANSWER_S) if isinstance(self.plane, Monitored) else []
        if silent:  # it can't be asked for its partitions
            status.waits += [Wait("the run", cause) for cause in silent]
            return
        partitions = [one for _, one in sorted(self.plane.status().partitions.items())]
        status.partitions += map(partition_line, partitions)
        status.waits += self.waits.now()
        if not status.waits and partitions and partitions[0].open:  # the loop itself fills it
            status.waits.append(Wait("the step", partitions[0].blocker()))

    def finish(self, folder: Path) -> None:
        """Settle the accounts. Raises ``ContractError`` where samples got lost, or count twice."""
        accounts = self.plane.status().accounts
        accounts.check()
        self.progress.samples = str(self.before + accounts)

    def summary(self) -> dict[str, str]:
        return {"samples": self.progress.samples} if self.progress.samples else {}
