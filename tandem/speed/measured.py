"""What a run reports of itself: the parts of its mean step, how it was run, and how near it came to its limit.

No torch: reads ``metrics.jsonl`` and ``config.yaml`` in the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.base.errors import ConfigError, DataError
from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.observe.metrics import CONFIG_FILE, METRICS_FILE, Row, read_rows
from tandem.plan.parts.engine import engine_width
from tandem.plan.parts.flow import plan_flow
from tandem.plan.parts.placement import placements
from tandem.speed.step_bound import Limit, Parts, Setting, best_step
from tandem.stages.table import generate, old_logprobs, push, score, timed_as, train, values

WARM_UP = 2
"""First steps left out: they compile, allocate, and fill the pipeline."""

ENOUGH = 3
"""Steps after them that make a mean."""

STEP, ROLLOUT, TRAIN = "time/step", generate.time_key, train.time_key
TRAINING = timed_as("train")

WORK = {"reference": timed_as("forward"), "old": (old_logprobs.time_key,)}
"""Part -> keys of ``metrics.jsonl`` that add up to it; seconds on the devices of its role."""

CLOCK = {
    "advantages": timed_as("advantages"),
    "rewards": (score.time_key,),
    "snapshot": ("time/push_health", "time/push_snapshot"),  # the actor stands for both
    "broadcast": ("time/push_transfer",),  # without the drain, in which engines are at work
    "swap": ("time/push_apply",),
}
VALUES = values.time_key  # the critic's: like a plug-in's stage in turn with forwards, but in fully async beside them
PUBLISH, TURNS, PUSH, DRAIN = push.time_key, "time/turns", "time/push_", "time/push_drain"
LONGEST, ENDED = "rollout/longest_s", "rollout/longest_ended_s"

RESUMED = "limit/resumed_after"
"""Key of the first line after a resume: lines before it may be of another config."""

NOT_OF_A_STEP = ("time/step", "time/evaluation", "time/save")
"""Keys of times that are no parts of a step."""


@dataclass(frozen=True)
class Measured:
    """The mean step of a run, over ``steps`` steps; ``seconds`` is its wall time."""

    run: Path
    setting: Setting
    parts: Parts
    steps: int
    seconds: float

    @property
    def limit(self) -> Limit:
        """The best possible step of these parts, run as they were."""
        return best_step(self.parts, self.setting)

    @property
    def fraction(self) -> float:
        """How much of the limit was reached: 1 is all of it."""
        return self.limit.seconds / self.seconds

    @property
    def rest(self) -> float:
        """Seconds of a step that no part explains: waits that should not be, logging, whatever else."""
        return max(0.0, self.seconds - self.limit.seconds)


def read_measured(run: Path) -> Measured:
    """Return the measured run in the folder ``run``.

    Raises ``DataError`` where there is no training run, where it has too few steps, or where it lacks a part.
    """
    rows, setting = timed_steps(run), setting_of(_config(run))
    counted = _steady(rows, setting)
    if len(counted) < ENOUGH:
        raise DataError(
            f"{run / METRICS_FILE} has {len(rows)} timed steps; the first {WARM_UP} and the last max_staleness are "
            f"left out and {ENOUGH} more make a mean: run at least {WARM_UP + setting.staleness + ENOUGH} "
            "(trainer.total_steps)"
        )
    for key in (ROLLOUT, TRAIN):
        if not any(key in row for row in counted):
            raise DataError(f"{run / METRICS_FILE}: no step has {key!r}; was it written by a training run?")
    return _measured(run, setting, counted)


def timed_steps(run: Path) -> list[Row]:
    """Return the lines of ``metrics.jsonl`` that belong to training steps, of a resumed run those since it was resumed:
    it may have gone on in another mode, and pipelines fill anew.
    """
    rows = [row for row in read_rows(run / METRICS_FILE) if row.get(STEP) is not None]
    began = max((place for place, row in enumerate(rows) if row.get(RESUMED) is not None), default=0)
    return rows[began:]


def step_summary(run: Path, setting: Setting) -> dict[str, str]:
    """Return what the steps of a run came to, for people, by label; nothing where no step has ended.

    A run too short to leave out its first and last steps is reported as it is.
    """
    rows = timed_steps(run)
    if not rows:
        return {}
    counted = _steady(rows, setting)
    if len(counted) < ENOUGH:
        counted = rows
    measured = _measured(run, setting, counted)
    keys = dict.fromkeys(key for row in counted for key in row if key.startswith("time/"))
    shown = {
        key.removeprefix("time/"): _mean(counted, (key,))
        for key in keys
        if key not in NOT_OF_A_STEP and not key.startswith(PUSH)
    }
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in shown.items())
    lag = max(float(str(row.get("lag/max", 0.0))) for row in rows)
    return {
        "step": f"{measured.seconds:.3g} s, {measured.fraction:.2f} of the best possible ({measured.limit.binding})",
        "parts of a step": f"{parts} s (means of {len(counted)} steps)",
        "lag": f"{_mean(rows, ('lag/mean',)):.2f} versions on average, {lag:.0f} at most",
    }


def step_limit(row: Mapping[str, object], setting: Setting) -> dict[str, float]:
    """Return the best possible step of the parts of one step, and the fraction of it that the step reached.

    A step may reach more than 1, since a sample that takes several steps ends in one of them. The mean over many steps
    can't: all parts are seconds of those steps, and what goes on side by side is counted once.
    """
    limit = best_step(parts_of([row], setting), setting).seconds
    return {"limit/step_s": limit, "limit/fraction": limit / float(str(row[STEP]))}


def setting_of(config: Config) -> Setting:
    """Say how ``config`` runs a step."""
    execution = config.execution
    devices = {placement.role: placement.devices for placement in placements(config)}
    named = (one if isinstance(one, str) else one.type for one in config.algorithm.stages)
    further = tuple(f"time/{name}" for name in named)
    rollout = config.actor_rollout_ref.rollout
    if execution.mode == "colocate":
        return Setting("colocate", rollout=max(devices.values()), further=further)
    return Setting(
        execution.mode,
        rollout=devices["rollout"],
        actor=devices["actor"],
        reference=devices.get("reference", 0),
        actor_fwd=devices.get("actor_fwd", 0),
        sub_batches=plan_flow(config).sub_batches,
        staleness=execution.max_staleness,
        overlap=execution.weight_sync.overlap,
        pipelined=execution.mode == "hybrid" and execution.train_pipelining != "off",
        drains=rollout.on_weight_update == "wait",
        at_once=hold_a_partition(config, devices["rollout"]),
        further=further,
    )


def hold_a_partition(config: Config, devices: int) -> bool:
    """Return whether engines on so many devices have room for all groups of a partition at a time."""
    rollout = config.actor_rollout_ref.rollout
    groups = (devices // engine_width(config)) * (rollout.max_num_seqs // rollout.n)
    return groups >= config.data.train_batch_size


def _config(run: Path) -> Config:
    if not (run / METRICS_FILE).is_file() or not (run / CONFIG_FILE).is_file():
        raise DataError(
            f"{run}: holds no {METRICS_FILE} with a {CONFIG_FILE} beside it; name the trainer.output_dir of a run"
        )
    try:
        config = load_config(run / CONFIG_FILE)
    except ConfigError as error:
        raise DataError(f"{run / CONFIG_FILE} can't be read as a config any more: {error}") from error
    if not isinstance(config, Config):
        raise DataError(f"{run}: is an SFT run; name the folder of a training run")
    return config


def _steady(rows: Sequence[Row], setting: Setting) -> Sequence[Row]:
    """Return the steps without those that fill the pipeline, and those at the end with less and less to generate."""
    return rows[WARM_UP : len(rows) - setting.staleness]


def _measured(run: Path, setting: Setting, rows: Sequence[Row]) -> Measured:
    return Measured(run, setting, parts_of(rows, setting), len(rows), _mean(rows, (STEP,)))


def parts_of(rows: Sequence[Mapping[str, object]], setting: Setting) -> Parts:
    """Return the parts of the mean step. Work is seconds times the devices of the role that did it."""
    together, apart = setting.mode == "colocate", setting.mode == "fully_async"
    actor = setting.rollout if together else setting.actor
    forward = {"reference": setting.reference, "old": setting.actor_fwd} if apart else dict.fromkeys(WORK, actor)
    work = {part: _mean(rows, keys) * forward[part] for part, keys in WORK.items()}
    work["old"] += 0.0 if apart else _mean(rows, (VALUES, *setting.further)) * actor
    clock = {part: _mean(rows, keys) for part, keys in CLOCK.items()}
    turns = _mean(rows, (PUBLISH, TURNS))
    drain = 0.0 if setting.overlap else _mean(rows, (DRAIN,))  # engines work in it: it is a part of rollout
    push = 0.0 if together or setting.overlap else max(0.0, _mean(rows, (PUBLISH,)) - drain)
    beside = _beside_generation(setting, push, clock)
    # One group counts between two pushes. An overlapped push comes within a step: two steps may see such a group end.
    longest = ENDED if not setting.overlap and any(ENDED in row for row in rows) else LONGEST
    pushes = 1 if setting.drains else setting.staleness  # that one group may live through
    return Parts(
        rollout=max(0.0, _mean(rows, (ROLLOUT,)) - beside) * setting.rollout,
        train=_mean(rows, TRAINING) * actor,
        longest=max(0.0, _mean(rows, (longest,)) - beside * pushes),
        turns=turns if together else 0.0,
        push=push,
        **work,
        **clock,
    )


def _beside_generation(setting: Setting, push: float, clock: Mapping[str, float]) -> float:
    """Return the seconds of a push that are in the time of generation as well. They are taken out of it: the push is a
    part of its own, and engines that go on over it are counted as if they stood.
    """
    if setting.mode == "colocate" or setting.staleness == 0:
        return 0.0  # nothing is generated until the new weights are there
    if setting.overlap:
        return 0.0 if setting.drains else clock["swap"]
    return max(0.0, push - clock["broadcast"] - clock["swap"]) if setting.drains else push


def _mean(rows: Sequence[Mapping[str, object]], keys: Sequence[str]) -> float:
    """Return the mean over the rows of the sum of ``keys``; a key that a row lacks took no time in it."""
    return sum(float(str(row[key])) for row in rows for key in keys if row.get(key) is not None) / len(rows)
