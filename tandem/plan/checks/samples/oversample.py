"""Whether more groups may be begun than a step needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.checks.samples.episode import plays_episodes
from tandem.plan.parts.engine import engine_capabilities

KEY = "actor_rollout_ref.rollout.oversample"


def check_oversample(config: Config) -> Iterator[Problem]:
    """Yield why the first groups that are done can't be taken, where more are begun than are needed."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.oversample == 0:
        return
    if config.trainer.exact:
        reason = "trainer.exact trains on the groups that were drawn, whichever are done first"
        yield Problem(KEY, rollout.oversample, reason, "Write 0, or trainer.exact: false")
    if plays_episodes(config):
        reason = f"an episode of several turns ({rollout.episode.type}) can't be ended from outside"
        yield Problem(KEY, rollout.oversample, reason, "Write 0")
    if not engine_capabilities(config).cancel:
        reason = f"the engine {rollout.name} can't end a group that nobody wants any more"
        remedy = "Write 0, or declare cancel=True where it is registered, if it can"
        yield Problem(KEY, rollout.oversample, reason, remedy)
