"""Which split of the devices, how many sub-batches and how much staleness would be fastest, by a measured run. Pure.

Work is assumed to split over devices without loss, and what no part of the measured step explains to stay as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tandem.config.execution import Devices
from tandem.config.schema import Config
from tandem.plan.parts.engine import engine_width
from tandem.plan.parts.placement import device_groups, placements
from tandem.speed.measured import Measured, hold_a_partition, setting_of
from tandem.speed.step_bound import Limit, Mode, Parts, Setting, best_step

STALENESS = range(5)
"""Values of ``max_staleness`` that are compared."""

WORTH = 0.99
"""A setting must be this much faster before it is preferred to a fresher, or a simpler, one."""


@dataclass(frozen=True)
class Choice:
    """A setting, the limit of its step, and the step that it promises: the limit and what was unexplained before."""

    setting: Setting
    limit: Limit
    seconds: float


@dataclass(frozen=True)
class Advice:
    """``now``: what the config would do. ``best``: the recommendation. ``compared``: colocate on all devices if the
    measured run was, then for each staleness the best split and number of sub-batches."""

    measured: Measured
    now: Choice
    best: Choice
    compared: tuple[Choice, ...]
    notes: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """The speed of the recommendation over that of ``now``."""
        return self.now.seconds / self.best.seconds


def advise(config: Config, measured: Measured) -> Advice:
    """Return the fastest way to run ``config`` on its devices, by the parts of ``measured``."""
    notes: list[str] = []
    current = setting_of(config)
    parts = _completed(measured, current, notes)

    def choice(setting: Setting) -> Choice:
        limit = best_step(parts, setting)
        return Choice(setting, limit, limit.seconds + measured.rest)

    total = sum(device_groups(placements(config)).values())
    mode: Mode = "hybrid" if current.mode == "colocate" else current.mode
    # A critic and a teacher of fully async have devices of their own, whose work no other role can take.
    splits = list(_splits(config, mode, current.devices if mode == "fully_async" else total, parts))
    # What taking turns costs is known only from a run that did.
    compared = [Setting("colocate", rollout=total)] if measured.setting.mode == "colocate" else []
    compared += [_best_of(parts, splits, staleness, config.data.train_batch_size) for staleness in STALENESS if splits]
    found = tuple(choice(setting) for setting in compared)
    best = _freshest([choice(current), *found])
    if total == 1:
        notes.append("on one device actor and rollout can only take turns: give execution.resource at least two")
    running_on = choice(replace(best.setting, drains=False))
    if running_on.seconds < best.seconds * WORTH:
        cost = (
            "the longest sample of every step holds up its push; with actor_rollout_ref.rollout.on_weight_update=keep"
        )
        notes.append(f"{cost} a step of {running_on.seconds:.3g} s is predicted")
    return Advice(measured, choice(current), best, found, tuple(notes))


def _completed(measured: Measured, wanted: Setting, notes: list[str]) -> Parts:
    """Return the measured parts, with a push where the measured run had none of the kind that is asked about."""
    parts = measured.parts
    if measured.setting.mode == "colocate":
        if wanted.devices > 1:
            notes.append("the measured run is colocate: what a push to other devices takes is unknown and left out")
        return parts
    if wanted.mode == "colocate":
        notes.append("the measured run has no turns to take: what sleeping and waking cost is unknown and left out")
        return parts
    in_background = parts.snapshot + parts.broadcast + parts.swap
    if not parts.push and in_background:
        return replace(parts, push=in_background)
    if wanted.overlap and not in_background:
        notes.append("the measured run doesn't overlap its pushes: all of a push is taken to go on in the background")
        return replace(parts, broadcast=parts.push)
    return parts


def _best_of(parts: Parts, splits: Iterable[Setting], staleness: int, prompts: int) -> Setting:
    """Return the fastest split, with the fewest sub-batches that cost next to nothing: each is a smaller batch to
    forward.
    """
    finest = [replace(split, staleness=staleness, sub_batches=prompts) for split in splits]
    best = min(finest, key=lambda setting: best_step(parts, setting).seconds)
    limit = best_step(parts, best).seconds
    divisors = (count for count in range(1, prompts + 1) if prompts % count == 0)
    coarser = (replace(best, sub_batches=count) for count in divisors)
    return next(setting for setting in coarser if best_step(parts, setting).seconds * WORTH <= limit)


def _splits(config: Config, mode: Mode, total: int, parts: Parts) -> Iterator[Setting]:
    """Yield the ways to divide ``total`` devices among the roles of ``mode``, in whole engines and whole model
    copies.
    """
    rollout, shard = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.devices_of_a_sample
    engine = engine_width(config)
    current = setting_of(config)
    flags = replace(current, mode=mode, actor=1, drains=rollout.on_weight_update == "wait")
    if mode == "hybrid":
        for count in range(engine, total, engine):
            if (total - count) % shard == 0:
                at_once = hold_a_partition(config, count)
                yield replace(flags, rollout=count, actor=total - count, at_once=at_once)
        return
    held = _shared_out(
        {"rollout": engine, "actor": shard, "actor_fwd": 1, "reference": min(1, current.reference)},
        {"rollout": parts.rollout, "actor": parts.train, "actor_fwd": parts.old, "reference": parts.reference},
        total,
    )
    yield replace(
        flags,
        rollout=held["rollout"],
        at_once=hold_a_partition(config, held["rollout"]),
        actor=held["actor"],
        actor_fwd=held["actor_fwd"],
        reference=held["reference"],
    )


def _shared_out(size: dict[str, int], work: dict[str, float], total: int) -> dict[str, int]:
    """Share out the devices of each role: unit after unit goes to the role that is the slowest, until one doesn't
    fit.
    """
    held = dict(size)
    while True:
        slowest = max((role for role in held if held[role]), key=lambda role: work[role] / held[role])
        if sum(held.values()) + size[slowest] > total:
            return held
        held[slowest] += size[slowest]


def _freshest(choices: Iterable[Choice]) -> Choice:
    """Return the fastest, or the least stale that is hardly slower; among those the first."""
    ranked = list(choices)
    fastest = min(choice.seconds for choice in ranked)
    near = [choice for choice in ranked if choice.seconds * WORTH <= fastest]
    return min(near, key=lambda choice: choice.setting.staleness)


def resource_of(setting: Setting, per_node: int) -> dict[str, Devices]:
    """Return ``execution.resource`` for the devices of a setting, on nodes of ``per_node`` devices."""
    counts = {"rollout": setting.rollout, "actor": setting.actor}
    if setting.mode == "colocate":
        counts["actor"] = setting.rollout
    counts |= {"reference": setting.reference, "actor_fwd": setting.actor_fwd}
    return {role: _nodes(count, per_node) for role, count in counts.items() if count}


def _nodes(count: int, per_node: int) -> Devices:
    return (count // per_node, per_node) if count > per_node and count % per_node == 0 else (1, count)
