"""What all runs that go step by step have in common: timing, the record of a step, evaluation and saving when due."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.base.interrupts import INTERRUPTS, held, hold, note_saved, release
from tandem.base.run_folder import CHECKPOINTS, FINAL_FOLDER
from tandem.columns.proto import DataProto
from tandem.config.schema import Config
from tandem.observe.metrics import RolloutRecord
from tandem.observe.run_log import RunLog
from tandem.plan.critic import untrained_steps
from tandem.plan.plan import Plan
from tandem.roles.actor import Actor
from tandem.session.exports import Exporter
from tandem.session.idle import IdleSteps, why_idle

logger = logging.getLogger(__name__)

_CHANGING = ("train", "train_critic")
"""Stages that change weights."""


@dataclass
class Progress:
    """How far the run is: ``step`` is the next one and equals the weights version. ``began`` is the first that this
    run does, or what is done of it since it was resumed.

    ``seconds`` and ``trained`` (batch, metrics of the update) are of the step before it; ``executed`` are its stages,
    ``push`` the seconds of the last publication by phase, ``beside`` those of what went on beside the loop.
    ``samples`` tells at the end of a run where all of them went. ``facts`` are what a run that goes on from here must
    know, as of the end of the last step; ``recorded``: that step is in the log; ``started``: when it began.
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
    facts: dict[str, Any] | None = None
    started: float = 0.0
    recorded: bool = True
    idle: IdleSteps = field(default_factory=IdleSteps)


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
            self.progress.started = time.monotonic()
            with self.log.timed("step"), self.counting():
                yield step
            self.progress.seconds = time.monotonic() - self.progress.started
            self._record(step)

    def counting(self) -> AbstractContextManager[None]:
        """Around each step: what goes on beside the loop is measured in it, and not between steps."""
        return nullcontext()

    def run(self, *stages: str) -> AbstractContextManager[None]:
        """Around planned stages that are one piece of work: timed under the first name, noted as executed."""
        if stages[0] in _CHANGING:
            hold()  # from here to the end of the step the weights are neither of this step nor of the next
        self.progress.executed.extend(stages)
        return self.log.timed(stages[0])

    def end_step(self, step: int, batch: DataProto, update: dict[str, float]) -> None:
        """Count the step as done."""
        self.progress.step = step + 1
        self.progress.trained = batch, update
        self.progress.recorded, self.progress.facts = False, self.facts()
        release()

    def evaluate(self, step: int) -> None:
        """Look at the held-out rows and log the result as ``step``."""
        self.log.log(step, self._evaluation())

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a resumed run must know beside the actor."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Write a checkpoint to resume from, with what the run exports inside."""

    def _save(self, step: int) -> None:
        with held():
            self.save(step)
            note_saved(f"{step} steps are saved in {self.output_dir / CHECKPOINTS}")

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
            except INTERRUPTS:
                with held():
                    self._leave_checkpoint()
                raise
            finally:
                told = self.summary()
                self.log.summarize(seconds=round(time.monotonic() - started, 1), steps=self.progress.step, **told)
                self.closing.close()

    def _leave_checkpoint(self) -> None:
        """At an interrupt: the steps that are done, so that a run goes on from there."""
        done = self.progress.step
        if self.progress.facts is None or not self.config.trainer.save_on_interrupt:
            return
        try:
            if not self.progress.recorded:
                self.progress.seconds = time.monotonic() - self.progress.started
                self._log(done - 1, {}, {})
            if not (self.output_dir / CHECKPOINTS / f"step_{done:08d}").exists():
                self.actor.wake()  # the engine may have had its turn on the devices
                self._save(done)
        except Exception as error:  # the interrupt is what is told; an older checkpoint is as it was
            logger.warning("no checkpoint could be written at the interrupt: %s", error)

    def _record(self, step: int) -> None:
        """Evaluate the finished step where due and log it, then save where due."""
        done, trainer = step + 1, self.config.trainer
        last, interval = done == self.progress.last, self.config.evaluation.interval
        times = self._times()
        evaluated = self._evaluation() if interval and (done % interval == 0 or last) else {}
        with held():
            metrics = self._log(step, evaluated, times)
        if trainer.save_interval and (done % trainer.save_interval == 0 or last):
            self._save(done)
        self._note_idle(step, metrics)

    def _log(self, step: int, evaluated: dict[str, float], times: dict[str, float]) -> dict[str, float]:
        """The line of the finished step, and its samples."""
        assert self.progress.trained is not None
        (batch, update), done = self.progress.trained, step + 1
        metrics: dict[str, float] = {
            "version": float(done),
            "updates": float(self.actor.updates),
            "throughput/tokens_per_second": float(batch.ragged("responses").lengths.sum()) / self.progress.seconds,
            **self._metrics(batch, step),
            **update,
            **evaluated,
            **times,
        }
        self.progress.recorded = True
        self.log.log(done, metrics, self._samples(batch, step))
        return metrics

    def _note_idle(self, step: int, metrics: dict[str, float]) -> None:
        """Tell of a finished step in which nothing was learned. Raises ``TandemError`` after too many of them."""
        assert self.progress.trained is not None
        (batch, update), trainer = self.progress.trained, self.config.trainer
        if step >= untrained_steps(self.config):
            why = why_idle(
                metrics,
                len(batch.dense("group_ids").unique()),
                masks_overlong=self.config.algorithm.overlong == "mask",
            )
            self.progress.idle.note(step + 1, update.get("optim/applied", 0.0) > 0, why, trainer.max_idle_steps)

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
