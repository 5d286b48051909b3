"""Stages of plug-ins, by name."""

from __future__ import annotations

import re
from typing import TypeVar

from tandem.base.errors import TandemError
from tandem.base.registry import Registry
from tandem.stages.facts import ACTOR, ACTOR_FWD, ADVANTAGES, CRITIC, REFERENCE, REWARD, ROLLOUT, TEACHER
from tandem.stages.stage import Stage
from tandem.stages.table import BUILT_IN

STAGES: Registry[type[Stage]] = Registry("stage")

TIMES = frozenset({"step", "wait", "turns", "evaluation", "save"})
"""Names of times that are no stages (``time/step``)."""

ROLES = frozenset({ACTOR, CRITIC, ROLLOUT, REWARD, REFERENCE, ACTOR_FWD, ADVANTAGES, TEACHER})
"""Roles have loops of their own in fully_async, and so has a stage of a plug-in, under its name."""

S = TypeVar("S", bound=type[Stage])


def register_stage(stage: S) -> S:
    """Make a subclass of ``Stage`` known, so that ``algorithm.stages`` may name it.

    Its class attribute ``name`` is the name, its constructor's parameters are its YAML parameters::

        @register_stage
        class Politeness(Stage):
            name = "politeness"
            def needs(self, step): return ("responses",)
            def gives(self, step): return ("token_rewards",)
            def build(self, roles): return with_politeness

    Raises ``TandemError`` for a name that is taken or can't be one, and for work that belongs elsewhere.
    """
    name = getattr(stage, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.startswith("push_"):
        raise TandemError(f"stage {stage.__name__}: set name to small letters, digits and _, such as 'process_reward'")
    if name in TIMES | ROLES | {built_in.name for built_in in BUILT_IN}:
        raise TandemError(f"stage {name!r}: the name is taken: choose another one")
    if stage.phase == "group":
        raise TandemError(
            f"stage {name!r}: what is done as a group is generated is a rollout engine's or a reward's: write "
            "phase = 'sub_batch', or register a reward"
        )
    if stage.changes_weights:
        raise TandemError(f"stage {name!r}: only the actor's loop changes weights: leave changes_weights out")
    STAGES.register(name)(stage)
    return stage
