"""Steps that train nothing: a warning at the first, and the end of the run where they go on."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from tandem.base.errors import TandemError
from tandem.observe.metrics import METRICS_FILE

logger = logging.getLogger(__name__)


class IdleSteps:
    """Counts the steps in a row without an optimizer step."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, step: int, applied: bool, why: str, most: int) -> None:
        """Note that step ``step`` is over. Raises ``TandemError`` with ``why``, where more than ``most`` trained
        nothing.
        """
        self._count = 0 if applied else self._count + 1
        if self._count == 1:
            logger.warning("step %d trained nothing: %s", step, why)
        if self._count > most:
            raise TandemError(
                f"{self._count} steps in a row trained nothing, the last one because {why}. Mend that, or let it go on "
                f"for longer with trainer.max_idle_steps (now {most})"
            )


def require_updates(updates: int, steps: int) -> None:
    """Refuse to call a run done that changed no weight. Raises ``TandemError``."""
    if updates == 0:
        raise TandemError(
            f"nothing was learned: not one optimizer step was applied in {steps} steps. {METRICS_FILE} says why "
            "(grad/norm, optim/skipped_steps; in RL also reward/std and reward/excluded)"
        )


def why_idle(metrics: Mapping[str, float], groups: int, *, masks_overlong: bool) -> str:
    """Return why a step of reinforcement learning had no optimizer step, from its metrics, of ``groups`` groups."""
    norm = metrics.get("grad/norm")
    if norm is not None and not math.isfinite(norm):
        return f"the gradient is not finite (grad/norm = {norm})"
    if metrics.get("length/max") == 0:
        return "all answers are empty"
    if masks_overlong and metrics.get("length/truncated") == 1:
        return "all answers were cut at data.max_response_length, and algorithm.overlong is mask"
    if metrics.get("reward/groups_without_signal", 0) >= groups:
        left, mean = metrics["reward/excluded"], metrics.get("reward/mean")
        counted = f" ({left:.0f} samples count for nothing)" if left else ""
        level = "" if mean is None else f", {mean:.3g} on average"
        return (
            f"the rewards of each group are all equal{level}{counted}: no fault where the task is merely too hard or "
            "too easy; more samples a prompt (actor_rollout_ref.rollout.n) or other prompts make such groups rarer"
        )
    return "no token was left to train, or every gradient was 0"
