"""What actor, critic and advantages report of a step, save and leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.run_folder import CRITIC_FOLDER
from tandem.columns.proto import DataProto
from tandem.config.correction import RolloutCorrectionConfig
from tandem.models.loading import save_pretrained_atomic
from tandem.models.precision import Precision
from tandem.roles.actor import Actor
from tandem.roles.advantages import AdvantageReport
from tandem.roles.correction import mismatch_report
from tandem.roles.critic import CRITIC, Critic
from tandem.session.idle import why_idle
from tandem.session.keep.rescue import Rescue
from tandem.session.progress import Progress, StepPart
from tandem.speed.measured import RESUMED, step_limit, step_summary
from tandem.speed.step_bound import Setting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def why_idle_batch(metrics: Mapping[str, float], batch: DataProto, *, masks_overlong: bool) -> str:
    """Return why a step over ``batch`` moved nothing, in words; the groups are counted from its ids."""
    return why_idle(metrics, len(batch.dense("group_ids").unique()), masks_overlong=masks_overlong)


class Learning(StepPart):
    """The actor's part of a run: what it has learned, and what a resume must know."""

    def __init__(self, actor: Actor, progress: Progress) -> None:
        self._actor, self._progress = actor, progress

    def metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        tokens = float(batch.ragged("responses").lengths.sum())
        return {
            "version": float(step + 1),
            "updates": float(self._actor.updates),
            "throughput/tokens_per_second": tokens / self._progress.seconds,
        }


class Criticism(StepPart):
    """The critic, which is saved and left beside the actor."""

    def __init__(self, critic: Critic, tokenizer: PreTrainedTokenizerBase, precision: Precision) -> None:
        self._critic, self._tokenizer, self._precision = critic, tokenizer, precision

    def metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        return self._critic.metrics

    def save(self, root: Path, step: int) -> dict[str, Path]:
        folder = root / f".{CRITIC}.partial"
        self._critic.save(folder, step)
        return {CRITIC: folder}

    def finish(self, folder: Path) -> None:
        with self.rescue(folder).around(folder / CRITIC_FOLDER):
            self._write(folder / CRITIC_FOLDER)

    def rescue(self, folder: Path) -> Rescue:
        return Rescue(self._write, folder, self._critic.steps, CRITIC)

    def _write(self, folder: Path) -> None:
        weights = dict(self._critic.export())
        save_pretrained_atomic(self._critic.model, self._tokenizer, folder, weights=weights, precision=self._precision)


class Estimates(StepPart):
    """What the advantages stage reports of a partition (``report``), and how far its samples were off-policy.

    ``correction`` is None where old log-probs are those of the rollout: nothing differs.
    """

    def __init__(self, report: Callable[[int], AdvantageReport], correction: RolloutCorrectionConfig | None) -> None:
        self._report, self._correction = report, correction

    def metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        mismatch = {} if self._correction is None else mismatch_report(batch, self._correction)
        return self._report(step).metrics | mismatch

    def facts(self, step: int) -> dict[str, Any]:
        """Return the state of the KL's controller after the partition before ``step``."""
        return {"kl": self._report(step - 1).state}


class Speed(StepPart):
    """The best possible step of the parts that a step had, run as ``setting`` says."""

    def __init__(self, setting: Setting, progress: Progress, output_dir: Path) -> None:
        self._setting, self._progress, self._output_dir = setting, progress, output_dir

    def limits(self, times: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of the best possible step, and the fraction of it that the step reached."""
        began = self._progress.began
        resumed = {RESUMED: float(began)} if 0 < began == self._progress.step - 1 else {}
        return step_limit(times, self._setting) | resumed

    def summary(self) -> dict[str, str]:
        done = self._progress.step > self._progress.began  # else what is there is of an earlier part of the run
        return step_summary(self._output_dir, self._setting) if done else {}
