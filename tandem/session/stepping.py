"""What all runs that go step by step have in common: timing, the record of a step, evaluation and saving when due."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tandem.columns.proto import DataProto
from tandem.config.schema import Config
from tandem.observe.metrics import RolloutRecord
from tandem.observe.run_log import RunLog
from tandem.plan.plan import Plan
from tandem.roles.actor import Actor
from tandem.session.exports import FINAL_FOLDER, Exporter
from tandem.stages.facts import REF

CHECKPOINTS = "checkpoints"


@dataclass
class Progress:
    """How far the run is: ``step`` is the next one and equals the weights version. ``began`` is the first that this
    run does, or what is done of it since it was resumed.

    ``seconds`` and ``trained`` (batch, metrics of the update) are of the step before it; ``executed`` are its stages,
    ``push`` the seconds of the last publication by phase, ``beside`` those of what went on beside the loop.
    ``samples`` tells at the end of a run where all of them went.
    """

    step: int
    last: int
    began: int = 0
    seconds: float = 0.0
    executed: list[str] = field(default_factory=list)
    push: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    trained: tuple[DataProto, dict[str, float]] | None = None
    samples: str = ""


@dataclass(frozen=True)
class Stepping(ABC):
    """A run as its loop sees it. What a step records, evaluates and saves is the subclass's.

    ``closing`` ends what was started for the run.
    """

    config: Config
    plan: Plan
    log: RunLog
    progress: Progress
    output_dir: Path
    closing: ExitStack

    @property
    @abstractmethod
    def actor(self) -> Actor:
        """The role that is trained."""

    @property
    @abstractmethod
    def exporter(self) -> Exporter:
        """What writes the actor's model."""

    def steps(self) -> Iterator[int]:
        """The steps that are left. Each is timed while the loop works on it, then recorded, evaluated and saved."""
        self.progress.began = self.progress.step
        while self.progress.step < self.progress.last:
            step = self.progress.step
            self.progress.executed = []
            started = time.monotonic()
            with self.log.timed("step"), self.counting():
                yield step
            self.progress.seconds = time.monotonic() - started
            self._record(step)

    def counting(self) -> AbstractContextManager[None]:
        """Around each step: what goes on beside the loop is measured in it, and not between steps."""
        return nullcontext()

    def run(self, *stages: str) -> AbstractContextManager[None]:
        """Around planned stages that are one piece of work: timed under the first name, noted as executed."""
        self.progress.executed.extend(stages)
        return self.log.timed(stages[0])

    def end_step(self, step: int, batch: DataProto, update: dict[str, float]) -> None:
        """Refresh the reference if it is due, count the step as done."""
        interval = self.config.actor_rollout_ref.ref.update_interval
        if interval is not None and REF in self.plan.tags and (step + 1) % interval == 0:
            self.actor.refresh_reference()
        self.progress.step = step + 1
        self.progress.trained = batch, update

    def evaluate(self, step: int) -> None:
        """Look at the held-out rows and log the result as ``step``."""
        self.log.log(step, self._evaluation())

    @abstractmethod
    def save(self, step: int) -> None:
        """Write a checkpoint to resume from, with what the run exports inside."""

    def finish(self) -> None:
        """Write what was trained."""
        self.exporter.write(self.output_dir / FINAL_FOLDER)
        self.log.summarize(model=str(self.output_dir / FINAL_FOLDER))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a whole run: the model is saved at its end; report and closing come whatever happens."""
        started = time.monotonic()
        with self.log:
            try:
                yield
                self.finish()
            finally:
                told = self.summary()
                self.log.summarize(seconds=round(time.monotonic() - started, 1), steps=self.progress.step, **told)
                self.closing.close()

    def _record(self, step: int) -> None:
        """Evaluate the finished step where due and log it, then save where due."""
        assert self.progress.trained is not None
        (batch, update), done, trainer = self.progress.trained, step + 1, self.config.trainer
        last, interval = done == self.progress.last, self.config.evaluation.interval
        times = self._times()
        evaluated = self._evaluation() if interval and (done % interval == 0 or last) else {}
        metrics: dict[str, float] = {
            "version": float(done),
            "updates": float(self.actor.updates),
            "throughput/tokens_per_second": float(batch.ragged("responses").lengths.sum()) / self.progress.seconds,
            **self._metrics(batch, step),
            **update,
            **evaluated,
            **times,
        }
        self.log.log(done, metrics, self._samples(batch, step))
        if trainer.save_interval and (done % trainer.save_interval == 0 or last):
            self.save(done)

    @abstractmethod
    def _metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        """What the finished step tells of its batch."""

    @abstractmethod
    def _evaluation(self) -> dict[str, float]:
        """Metrics of the held-out rows; none where there are no such rows."""

    def _samples(self, batch: DataProto, step: int) -> Sequence[RolloutRecord]:
        """Samples to write down."""
        return ()

    def _times(self) -> dict[str, float]:
        """Parts of the finished step that the log doesn't know of itself."""
        return {}

    def summary(self) -> dict[str, str]:
        """What the end of the run tells beside its length."""
        return {}
