"""Weights & Biases (https://docs.wandb.ai), online or offline as ``WANDB_MODE`` and ``wandb offline`` say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from tandem.base.errors import TandemError
from tandem.observe.trackers.protocol import TRACKERS, RunEnd, RunInfo
from tandem.observe.trackers.service import Service, package

EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 130}


@TRACKERS.register("wandb", package="wandb", extra="wandb", service=True)
class WandbTracker(Service):
    """A run of W&B. What W&B would find out by itself is not sent: command line, repository, output of the process."""

    name = "wandb"

    def open(self, run: RunInfo, known: str | None) -> str:
        """Open the run, without asking on the terminal for a key."""
        self._wandb = package("wandb")
        found = known or uuid4().hex[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(
            console="off",
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        mode = os.environ.get("WANDB_MODE") or self._wandb.setup().settings.mode
        if mode in ("online", "shared") and not self._wandb.login(prompt=False):
            raise TandemError("there is no key: run `wandb login`, or set WANDB_MODE=offline")
        self._run: Any = self._wandb.init(
            project=run.project,
            name=run.name,
            id=found,
            resume="allow",
            dir=str(self.folder),
            config=dict(run.config),
            settings=settings,
        )
        self._exit_code = 0
        return found

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Add them to the step's row."""
        self._run.log(dict(values), step=step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Add a histogram of each to the step's row."""
        self._run.log({name: self._wandb.Histogram(list(shown)) for name, shown in values.items()}, step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table to the step's row."""
        shown = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({name: shown}, step=step)

    def ended(self, end: RunEnd) -> None:
        """Put what is known into the summary; the exit code says how it ended."""
        self._run.summary.update(self.summary(end))
        self._exit_code = EXIT_CODES[end.outcome]

    def finish(self) -> None:
        """Send what is still pending."""
        self._run.finish(exit_code=self._exit_code)
