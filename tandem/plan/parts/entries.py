"""The registered things that a config names, looked up once."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.algorithms import ADVANTAGES, DISTILLATIONS, KL_TYPES, POLICY_LOSSES, PREFERENCE_LOSSES
from tandem.algorithms.distillation import teacher_columns
from tandem.base.errors import Problem, UnknownNameError
from tandem.base.exact_mode import ask_for_exact_mode
from tandem.base.registry import Entry, Registry, Signature, near
from tandem.config.schema import Config, StageConfig
from tandem.plan.parts.teacher import learns_from_reward, uses_teacher
from tandem.reward import resolve as _built_in  # noqa: F401  (registers the built-in scorers)
from tandem.reward.static import describe
from tandem.rollout.registry import engines
from tandem.stages.registry import STAGES
from tandem.stages.stage import Stage

STRATEGIES = ("fsdp2", "fsdp", "megatron")


@dataclass(frozen=True)
class Entries:
    """What the names in a config stand for; None where a name is unknown (a problem says so).

    ``estimates``: advantages are estimated from rewards. ``stages`` are those of plug-ins that can be made.
    """

    advantage: Entry[Any] | None
    advantage_parameters: dict[str, Any]
    policy_loss: Entry[Any] | None
    preference_loss: Entry[Any] | None
    kl: Entry[Any] | None
    distillation: Entry[Any] | None
    estimates: bool
    reward: Signature | None
    stages: tuple[Stage, ...] = ()


def advantage_name(config: Config) -> str:
    """Return the estimator's name, in either way of writing it."""
    written = config.algorithm.adv_estimator
    return written if isinstance(written, str) else written.type


def estimator_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that the estimator must have; none where its name is unknown, or nothing is estimated."""
    if not learns_from_reward(config):
        return ()
    entry = _find(ADVANTAGES, advantage_name(config))
    return () if entry is None else entry.signature.columns


def distillation_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that a teacher's forward gives; none where nobody teaches."""
    teaching = config.algorithm.distillation
    entry = _find(DISTILLATIONS, teaching.type) if teaching is not None and uses_teacher(config) else None
    return () if entry is None else teacher_columns(entry.signature)


def distillation_parameter(config: Config, name: str) -> Any:
    """Return a parameter of the distillation, written or its default; None where it has none of that name."""
    teaching = config.algorithm.distillation
    entry = None if teaching is None else _find(DISTILLATIONS, teaching.type)
    if teaching is None or entry is None or name not in entry.signature.parameters:
        return None
    return teaching.parameters.get(name, entry.signature.parameters[name].default)


def look_up(config: Config) -> Entries:
    """Find everything that the config names; plugins must be imported already."""
    algorithm, written = config.algorithm, config.algorithm.adv_estimator
    reward = describe(config.reward_manager.type, config.reward_manager.file, config.plugins)
    return Entries(
        advantage=_find(ADVANTAGES, advantage_name(config)),
        advantage_parameters={} if isinstance(written, str) else written.parameters,
        policy_loss=_find(POLICY_LOSSES, algorithm.policy_loss.type),
        preference_loss=_find(PREFERENCE_LOSSES, algorithm.policy_loss.type),
        kl=_find(KL_TYPES, algorithm.kl.type),
        distillation=None if algorithm.distillation is None else _find(DISTILLATIONS, algorithm.distillation.type),
        estimates=learns_from_reward(config),
        reward=reward if isinstance(reward, Signature) else None,
        stages=tuple(stage for stage in map(made_stage, named_stages(config)) if isinstance(stage, Stage)),
    )


def named_stages(config: Config) -> tuple[StageConfig, ...]:
    """Return the stages of plug-ins that the config names, in either way of writing them."""
    return tuple(StageConfig(type=one) if isinstance(one, str) else one for one in config.algorithm.stages)


def made_stage(named: StageConfig) -> Stage | Exception | None:
    """Return the stage, or why its constructor refuses its parameters; None for an unknown name."""
    entry = _find(STAGES, named.type)
    try:
        return None if entry is None else entry.target(**named.parameters)
    except Exception as error:  # another's code: whatever it says is a problem of the plan
        return error


def _find(registry: Registry[Any], name: str) -> Entry[Any] | None:
    try:
        return registry[name]
    except UnknownNameError:
        return None


def unknown_names(config: Config) -> list[Problem]:
    """Return a problem for each name that no registry has."""
    estimator_key = "algorithm.adv_estimator" + ("" if isinstance(config.algorithm.adv_estimator, str) else ".type")
    rollout, strategy = config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.actor.strategy
    losses = [*POLICY_LOSSES, *PREFERENCE_LOSSES]
    teaching = config.algorithm.distillation
    taught = (
        ()
        if teaching is None
        else (("algorithm.distillation.type", teaching.type, "distillation", list(DISTILLATIONS)),)
    )
    named = (
        *taught,
        (estimator_key, advantage_name(config), "advantage estimator", list(ADVANTAGES)),
        ("algorithm.policy_loss.type", config.algorithm.policy_loss.type, "policy loss", losses),
        ("algorithm.kl.type", config.algorithm.kl.type, "KL type", list(KL_TYPES)),
        ("actor_rollout_ref.rollout.name", rollout, "rollout engine", list(engines)),
        ("actor_rollout_ref.actor.strategy", strategy, "training engine", list(STRATEGIES)),
    )
    found = [unknown(key, name, kind, known) for key, name, kind, known in named if name not in known]
    return [_as_loss(problem) if problem.key == estimator_key else problem for problem in found]


def _as_loss(problem: Problem) -> Problem:
    """Return the problem of an unknown estimator, where it is a loss: other programs name some of these so."""
    if problem.value not in (*POLICY_LOSSES, *PREFERENCE_LOSSES):
        return problem
    remedy = f"Write algorithm.policy_loss.type: {problem.value}, and adv_estimator: grpo or another"
    return Problem(problem.key, problem.value, "it is a policy loss and estimates no advantages", remedy)


def unknown(key: str, name: str, kind: str, known: list[str]) -> Problem:
    """Return the problem of a name that isn't there; the remedy lists the near ones, or all."""
    hint = near(name, known)
    if hint.startswith("did you mean"):
        return Problem(key, name, f"unknown {kind}", f"D{hint[1:]} Known: {', '.join(sorted(known))}")
    return Problem(key, name, f"unknown {kind}", f"Write one of {', '.join(sorted(known))}")


def import_plugins(config: Config) -> list[Problem]:
    """Import the plugins, so that what they register is known; a problem for each that can't be."""
    if config.trainer.exact:
        ask_for_exact_mode()  # a plug-in may compute at once, and that would fix another mode
    problems = []
    for index, name in enumerate(config.plugins):
        key = f"plugins[{index}]"
        if not all(part.isidentifier() for part in name.split(".")):
            meant = re.sub("[^0-9A-Za-z_]", "", Path(name).stem) or "my_plugin"
            reason = "a plug-in is named as in an import, not by its path"
            problems.append(Problem(key, name, reason, f"Write {meant}, and put its folder on PYTHONPATH"))
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                remedy = "Write the name of an importable module: install it, or put its folder on PYTHONPATH"
                problems.append(Problem(key, name, f"there is no module {error.name!r}", remedy))
            else:
                reason = f"importing it fails: {error}"
                problems.append(Problem(key, name, reason, f"Install {error.name}, or correct the import"))
        except (Exception, SystemExit) as error:
            reason = f"importing it fails: {type(error).__name__}: {error}"
            problems.append(Problem(key, name, reason, "Correct the module"))
    return problems
