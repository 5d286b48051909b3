"""A run that goes step by step: timing, the record of a step, evaluation and saving when due, the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tandem.base.interrupts import INTERRUPTS, held, hold, note_saved, release
from tandem.base.run_folder import CHECKPOINTS, FINAL_FOLDER
from tandem.config.trainer import TrainerConfig
from tandem.observe.run_log import RunLog
from tandem.observe.status.channel import control_channel
from tandem.observe.status.status import Doing, Status
from tandem.plan.resumed import SETTINGS
from tandem.session.keep.rescue import Rescue, unfinished_removed
from tandem.session.progress import Progress, StepPart
from tandem.stages.stage import Stage
from tandem.stages.table import train, train_critic
from tandem.train.best import BestKept, best_checkpoint

logger = logging.getLogger(__name__)

_CHANGING = (train.name, train_critic.name)
"""Stages that change weights."""


class Exports(Protocol):
    """Writes the model that is trained. ``Exporter`` does, or ``PlainExport`` for a model of the user's own."""

    def write(self, folder: Path) -> None:
        """Write the trained model into ``folder``, whole or not at all."""

    def write_parts(self, root: Path) -> dict[str, Path]:
        """Return what a checkpoint holds of it: folders written under ``root``, by name."""


class Save(Protocol):
    """Writes a checkpoint of the model that is trained, with the facts and folders of others. ``Actor.save`` is one."""

    def __call__(
        self, root: Path, step: int, *, facts: Mapping[str, Any], keep: int, parts: Mapping[str, Path]
    ) -> object:
        """Write a checkpoint of ``step`` under ``root``; ``keep`` is how many checkpoints stay."""


@dataclass(frozen=True)
class Run:
    """The steps of a run, and all that happens around them.

    ``parts`` are asked in their order. ``look`` gives the metrics of the held-out rows (none where there are no such
    rows), before the first step with ``at_start``, after every ``interval`` steps (0: never) and after the last;
    ``enough`` says whether they end the run. ``limits`` adds what follows from the times of a step. ``counting`` is the
    context of a step while the loop works on it. ``why_idle`` says of a step, from its metrics and batch, why it
    trained nothing; the first ``untrained`` steps may. ``awake`` lets the model be saved, whoever's turn it is.
    ``closing`` ends what was started for the run. ``settings`` is what its checkpoints say of it.
    """

    trainer: TrainerConfig
    log: RunLog
    progress: Progress
    output_dir: Path
    exporter: Exports
    checkpoint: Save | None = None
    parts: Sequence[StepPart] = ()
    interval: int = 0
    at_start: bool = False
    look: Callable[[], dict[str, float]] = dict
    enough: Callable[[Mapping[str, float]], bool] = lambda evaluated: False
    limits: Callable[[Mapping[str, float]], dict[str, float]] = lambda times: {}
    counting: Callable[[], AbstractContextManager[None]] = nullcontext
    why_idle: Callable[[Mapping[str, float], Any], str] = lambda metrics, batch: (
        f"its gradient norm is {metrics['grad/norm']:g}"
    )
    untrained: int = 0
    awake: Callable[[], None] = lambda: None
    closing: ExitStack = field(default_factory=ExitStack)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The next step: weights of this version are there."""
        return self.progress.step

    @cached_property
    def best(self) -> BestKept | None:
        """What says which checkpoint is the best, where the best is kept."""
        metric, done = self.trainer.keep_best, self.progress.step
        return None if metric is None else BestKept(self.output_dir / CHECKPOINTS, metric, done if done else None)

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left. Each is timed while the loop works on it, then recorded, evaluated and
        saved.
        """
        progress = self.progress
        progress.began = progress.step
        assert self.best is None or self.best.root  # made here, where the steps that are done are those of the resume
        while progress.step < progress.last and not progress.over:
            step = progress.step
            progress.executed = []
            progress.started = time.monotonic()
            with self.log.timed("step"), self.counting():
                yield step
            progress.seconds = time.monotonic() - progress.started
            self._record(step)

    def stage(self, *stages: Stage) -> AbstractContextManager[None]:
        """Return a context around stages that are one piece of work: timed under the first, noted as executed."""
        return self.executing(*(stage.name for stage in stages))

    def executing(self, *names: str) -> AbstractContextManager[None]:
        """Return a context around stages with these names that are one piece of work of the loop.

        From where weights change to the end of the step a signal waits: they are neither of this step nor of the next.
        """
        if names[0] in _CHANGING:
            hold()
        self.progress.executed.extend(names)
        return self.log.timed(names[0])

    def end_step(self, step: int, batch: Any, update: dict[str, float]) -> None:
        """Count the step on ``batch`` as done: its samples are dropped, the reference follows where that is due.

        New weights are pushed after it, in every mode: what the next samples need room for is free by then.
        """
        for part in self.parts:
            part.end_step(step)
        self.progress.step = step + 1
        self.progress.trained = batch, update
        self.progress.recorded, self.progress.facts = False, self._facts()
        release()

    def evaluate_at_start(self) -> None:
        """Look at the held-out rows before the first step, where that is asked for."""
        if self.at_start and self.progress.step == 0:
            self.log.log(0, self.look())

    def save(self, step: int) -> None:
        """Write a checkpoint to resume from, with what the run exports inside; nothing where it keeps none."""
        if self.checkpoint is None:
            return
        root = self.output_dir / CHECKPOINTS
        with held(), self.log.timed("save"), self._rescue().around(root), unfinished_removed(root):
            self.log.settle()
            parts = self.exporter.write_parts(root)
            for part in self.parts:
                parts |= part.save(root, step)
            facts = self._facts() if self.progress.facts is None else self.progress.facts
            self.checkpoint(root, step, facts=facts, keep=self.trainer.keep_checkpoints, parts=parts)
            note_saved(f"{step} steps are saved in {root}")

    def _facts(self) -> dict[str, Any]:
        """Return what a resumed run must know beside the model that is trained."""
        step = self.progress.step
        own = {"step": step, SETTINGS: self.settings}
        return own | {name: fact for part in self.parts for name, fact in part.facts(step).items()}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Guard a whole run: the model is saved at its end; report and closing come whatever happens."""
        started = time.monotonic()
        with self.log, control_channel(self.output_dir, {"status": lambda: self.status().to_json()}):
            try:
                with ExitStack() as around:
                    for part in self.parts:
                        around.enter_context(part.running())
                    yield
                self._finish()
            except INTERRUPTS:
                with held():
                    self._leave_checkpoint()
                raise
            finally:
                summary = self.summary()
                self.log.summarize(seconds=round(time.monotonic() - started, 1), steps=self.progress.step, **summary)
                self.closing.close()

    def status(self) -> Status:
        """Return how the run stands at this moment; for another thread than the loop's."""
        doing = [Doing(what, seconds) for what, seconds in self.log.doing()]
        status = Status(self.progress.step, self.progress.last, doing)
        for part in self.parts:
            part.report_status(status)
        return status

    def summary(self) -> dict[str, str]:
        """Return what is printed at the end of the run beside its length."""
        found = {label: summary for part in self.parts for label, summary in part.summary().items()}
        best = None if self.best is None else best_checkpoint(self.best.root)
        return found if best is None else {**found, "best": f"{best.path} ({best.metric} {best.value:.4g})"}

    def _finish(self) -> None:
        """Write the trained model and what the parts leave with it."""
        final = self.output_dir / FINAL_FOLDER
        with self._rescue().around(final):
            self.exporter.write(final)
        self.log.summarize(model=str(final))
        for part in self.parts:
            part.finish(self.output_dir)

    def _rescue(self) -> Rescue:
        """Return what keeps the model where it can't be written, and what the parts train beside it."""
        beside = [rescue for part in self.parts if (rescue := part.rescue(self.output_dir)) is not None]
        return Rescue(self.exporter.write, self.output_dir, self.progress.step, beside=beside)

    def _leave_checkpoint(self) -> None:
        """Save the steps that are done at an interrupt, so that a run goes on from there."""
        done = self.progress.step
        if self.progress.facts is None or not self.trainer.save_on_interrupt:
            return
        try:
            if not self.progress.recorded:
                self.progress.seconds = time.monotonic() - self.progress.started
                self._log(done - 1, {}, {})
            if not (self.output_dir / CHECKPOINTS / f"step_{done:08d}").exists():
                self.awake()
                self.save(done)
        except Exception as error:  # the interrupt is what is reported; an older checkpoint is as it was
            logger.warning("no checkpoint could be written at the interrupt: %s", error)

    def _record(self, step: int) -> None:
        """Evaluate the finished step where due and log it, then save where due.

        Raises ``TandemError`` where too many steps in a row trained nothing.
        """
        progress, done, save = self.progress, step + 1, self.trainer.save_interval
        last = done == progress.last
        times = self.log.drain()
        for part in self.parts:
            times |= part.times(step)
        times |= self.limits(times)
        evaluated = self.look() if self.interval and (done % self.interval == 0 or last) else {}
        with held():
            metrics = self._log(step, evaluated, times)
            progress.over = self.enough(evaluated)
            if progress.over:
                progress.facts = self._facts()  # what ended the run is one of them
        is_best = self.best is not None and self.best.note(done, evaluated)
        if is_best or (save and (done % save == 0 or last or progress.over)):
            self.save(done)
        assert progress.trained is not None
        batch, update = progress.trained
        if step >= self.untrained:
            applied, most = update.get("optim/applied", 0.0) > 0, self.trainer.max_idle_steps
            progress.idle.note(done, applied, self.why_idle(metrics, batch), most)

    def _log(self, step: int, evaluated: Mapping[str, float], times: Mapping[str, float]) -> dict[str, float]:
        """Return the line of the finished step, and its samples."""
        assert self.progress.trained is not None
        batch, update = self.progress.trained
        metrics: dict[str, float] = {}
        for part in self.parts:
            metrics |= part.metrics(batch, step)
        metrics |= {**update, **evaluated, **times}
        records = [record for part in self.parts for record in part.records(batch, step)]
        self.progress.recorded = True
        self.log.log(step + 1, metrics, records)
        for part in self.parts:
            part.logged(batch, step)
        return metrics
