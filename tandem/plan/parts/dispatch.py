"""In which order engines are given the prompts of a step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.parts.engine import engine_width
from tandem.plan.parts.flow import plan_flow
from tandem.plan.parts.placement import Placement

KEY = "actor_rollout_ref.rollout.dispatch"


def begins_longest_first(config: Config, placed: Iterable[Placement]) -> bool:
    """Return whether prompts whose answers were longest are begun first.

    By itself where several engines share them, unless the order must follow from the draws alone (``trainer.exact``),
    or the first tickets are waited for (``train_pipelining: step``).
    """
    chosen = config.actor_rollout_ref.rollout.dispatch
    if chosen != "auto":
        return chosen == "longest_first"
    devices = sum(placement.devices for placement in placed if placement.role == "rollout")
    several = devices > engine_width(config)
    return several and not config.trainer.exact and plan_flow(config).pipelining != "step"


def check_dispatch(config: Config) -> Iterator[Problem]:
    """Yield a problem where the order would follow from what was generated before, and must not."""
    if config.trainer.exact and config.actor_rollout_ref.rollout.dispatch == "longest_first":
        reason = "trainer.exact gives prompts in the order in which they are drawn, whatever was generated before"
        yield Problem(KEY, "longest_first", reason, "Write auto or in_order, or trainer.exact: false")
