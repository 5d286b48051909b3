"""Contradictions in the stages that a config names, and in what stages need and give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.algorithms import ADVANTAGES
from tandem.base.errors import Problem
from tandem.columns.schema import declared_columns
from tandem.config.schema import Config
from tandem.plan.checks.parameters import check_parameters
from tandem.plan.checks.samples.episode import plays_episodes
from tandem.plan.parts.entries import Entries, advantage_name, made_stage, named_stages, unknown
from tandem.plan.parts.stages import SOURCE_COLUMNS, plan_stages
from tandem.stages.registry import STAGES
from tandem.stages.stage import PlannedStage
from tandem.stages.table import BUILT_IN

KEY = "algorithm.stages"
TOKEN_REWARDS = "token_rewards"
TURN_REWARDS = "actor_rollout_ref.rollout.episode.turn_rewards"
TOKEN_LEVEL = "token_level"
"""Trait of an estimator for which a reward counts where it is given."""


def check_stages(config: Config, entries: Entries) -> Iterator[Problem]:
    """Yield every problem of the stages that plug-ins add."""
    yield from _check_names(config)
    if entries.stages:
        yield from _check_columns(config, entries)
    yield from _check_token_rewards(config, entries)


def _check_names(config: Config) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, named in enumerate(named_stages(config)):
        key, name = f"{KEY}[{index}]", named.type
        if name in seen:
            yield Problem(key, name, "a stage is done once, and it is named twice", "Keep one of the two entries")
            continue
        seen.add(name)
        if name in {stage.name for stage in BUILT_IN}:
            reason = "it is done wherever something reads what it gives: it can't be asked for"
            yield Problem(key, name, reason, "Remove this entry")
        elif name not in STAGES:
            yield unknown(key, name, "stage", STAGES.names() or ["the name that a module of plugins registers"])
        else:
            found = list(check_parameters(key, "stage", name, named.parameters, STAGES[name].signature))
            yield from found
            made = made_stage(named)
            if isinstance(made, Exception) and not found:
                reason = f"it can't be made: {type(made).__name__}: {made}"
                yield Problem(key, name, reason, "Correct its parameters, or its constructor")


def _check_columns(config: Config, entries: Entries) -> Iterator[Problem]:
    planned = plan_stages(config, entries)
    keys = key_of_stages(config)
    given = dict.fromkeys(SOURCE_COLUMNS, "the data")
    for place, stage in enumerate(planned):
        own = stage.name in keys
        for name in stage.needs if own else ():
            later = [other for other in planned[place:] if name in other.gives]
            if name not in given and later:
                yield _too_late(keys[stage.name], stage, name, later[0])
        for name in stage.gives:
            other = given.get(name)
            if other is not None:
                key = keys.get(stage.name) or keys.get(other, KEY)
                reason = f"it gives the column {name!r}, which {other} gives already"
                yield Problem(key, stage.name, reason, "Give another column: one that is there is never changed")
            given[name] = stage.name
            if own and name not in declared_columns():
                reason = f"it gives the column {name!r}, which nobody declared"
                remedy = f"Write declare_column({name!r}, kind, dtype, description) in its module"
                yield Problem(keys[stage.name], stage.name, reason, remedy)
        read = {name for other in planned for name in other.needs}
        if own and not read.intersection(stage.gives):
            reason = f"nothing reads what it gives ({', '.join(stage.gives) or 'nothing'})"
            remedy = "Remove it, or name an estimator or a loss that reads it"
            yield Problem(keys[stage.name], stage.name, reason, remedy)


def _too_late(key: str, stage: PlannedStage, column: str, giver: PlannedStage) -> Problem:
    reason = f"it needs the column {column!r}, which {giver.name} gives after it"
    if stage.phase == "sub_batch" and giver.phase == "partition":
        reason += f": {giver.name} sees the whole partition, {stage.name} a sub-batch"
        return Problem(key, stage.name, reason, "Write phase = 'partition' in the stage")
    return Problem(key, stage.name, reason, "Let it need only what is there before what it gives is read")


def _check_token_rewards(config: Config, entries: Entries) -> Iterator[Problem]:
    """Report rewards at tokens for an estimator that doesn't count a reward where it is given."""
    givers = _givers(config, entries, TOKEN_REWARDS) if entries.stages else []
    if plays_episodes(config) and config.actor_rollout_ref.rollout.episode.turn_rewards:
        givers.insert(0, (TURN_REWARDS, "the episode"))
    if not givers or entries.advantage is None or not entries.estimates:
        return
    key, name = givers[0]
    value, place = (True, "turn") if key == TURN_REWARDS else (name, "token")
    if not entries.advantage.traits.get(TOKEN_LEVEL):
        estimator = advantage_name(config)
        reason = f"it gives a reward at each {place}, and {estimator} adds them up to one reward per sample"
        remedy = f"Write algorithm.adv_estimator: {' or '.join(_token_level())}; if {estimator} is yours and counts a "
        yield Problem(key, value, reason, f"{remedy}reward where it is given, register it with {TOKEN_LEVEL}=True")
    if config.algorithm.filter_groups.enable:
        reason = f"it drops groups of equal rewards before {name} has told their {place}s apart"
        remedy = f"Write false, or leave {key.rpartition('.')[2] if key == TURN_REWARDS else name} out"
        yield Problem("algorithm.filter_groups.enable", True, reason, remedy)


def _token_level() -> Sequence[str]:
    return [name for name in ADVANTAGES if ADVANTAGES[name].traits.get(TOKEN_LEVEL)]


def _givers(config: Config, entries: Entries, column: str) -> list[tuple[str, str]]:
    """Return (key, name) of each named stage that gives ``column``."""
    keys = key_of_stages(config)
    planned = plan_stages(config, entries)
    return [(keys[one.name], one.name) for one in planned if one.name in keys and column in one.gives]


def key_of_stages(config: Config) -> dict[str, str]:
    """Return where the config names each stage of a plug-in."""
    return {named.type: f"{KEY}[{index}]" for index, named in enumerate(named_stages(config))}
