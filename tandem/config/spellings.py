"""Other ways to write the same thing, brought to the one spelling of the schema before it is validated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any

from pydantic import BaseModel

from tandem.base.errors import Problem
from tandem.config.tree import field_at, members

KL_PLACES = {"use_kl_loss": "loss", "use_kl_in_reward": "reward"}
"""Switches of ``algorithm`` and where the KL is that they ask for."""

KL_COEFS = {"kl_loss_coef": "loss", "kl_coef": "reward"}
"""Coefficients of ``algorithm`` and where the KL is that they weigh. The one of the reward is its switch as well."""

KL_SPELLINGS = tuple(f"algorithm.{name}" for name in (*KL_PLACES, *KL_COEFS))
"""Keys that stand for keys of ``algorithm.kl``, which has the KL in one place."""

BETAS = ("adam_beta1", "adam_beta2")
SWITCHES = (*KL_PLACES, "use_tensorboard")
SPELLINGS = (*KL_SPELLINGS, *(f"actor_rollout_ref.actor.optim.{name}" for name in BETAS), "trainer.use_tensorboard")
"""All keys that stand for others."""


def place_kl(tree: dict[Any, Any], command_line: Collection[str] = ()) -> list[Problem]:
    """Turn the spellings into ``algorithm.kl.in`` and ``algorithm.kl.coef``; what they contradict is refused.

    ``command_line`` are the keys that it wrote: it wins over a coefficient of the file, never over one of its own.
    """
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, dict):
        return []
    given = {name: algorithm.pop(name) for name in (*KL_PLACES, *KL_COEFS) if name in algorithm}
    problems = [problem for name, value in given.items() if (problem := _misfit(name, value)) is not None]
    kl = algorithm.get("kl", {})
    if problems or not given or not isinstance(kl, dict | None):
        return problems  # the validation says what is wrong with another kl
    kl = dict(kl or {})
    place, problems = _place(given, kl, command_line)
    if place is not None:
        kl["in"] = place
    for name, where in KL_COEFS.items():
        if name in given and where == place:
            problems += _weigh(kl, name, given[name], command_line)
        elif given.get(name) and not problems:
            reason = f"nothing reads it: the KL is {f'in the {place}' if place else 'off'}"
            remedy = "Write algorithm.use_kl_loss: true (--use-kl-loss) too, or leave it out"
            problems.append(Problem(f"algorithm.{name}", given[name], reason, remedy))
    if kl:
        algorithm["kl"] = kl
    return problems


def _misfit(name: str, value: object) -> Problem | None:
    """Return the problem of a spelling with a value of another type."""
    if name in KL_PLACES and not isinstance(value, bool):
        remedy = f"Write algorithm.kl.in: {KL_PLACES[name]}, or leave it out"
        return Problem(f"algorithm.{name}", value, "not true or false", remedy)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in KL_COEFS and not (number and 0 <= float(str(value)) < float("inf")):
        reason = "it weighs the KL, and is no number of 0 or more"
        return Problem(f"algorithm.{name}", value, reason, "Write a number such as 0.001, or 0 for none")
    return None


def _place(
    given: Mapping[str, Any], kl: Mapping[str, Any], command_line: Collection[str]
) -> tuple[str | None, list[Problem]]:
    """Return where the KL is; None where nothing asks for one."""
    asked = [(KL_PLACES[name], name) for name in KL_PLACES if given.get(name)]
    asked += [("reward", f"kl_coef {given['kl_coef']}")] if given.get("kl_coef") else []
    asked += [(str(kl["in"]), f"kl.in {kl['in']}")] if kl.get("in") in KL_PLACES.values() else []
    places = sorted({place for place, _ in asked})
    if len(places) > 1:
        by = " and ".join(f"in the {place} ({', '.join(n for p, n in asked if p == place)})" for place in places)
        reason = f"a KL in both places penalises the same thing twice: {by}"
        remedy = "Choose one: algorithm.kl.in: loss, or algorithm.kl.in: reward"
        return "loss", [Problem("algorithm.kl.in", places, reason, remedy)]
    if not asked:
        return None, []
    place, by = asked[0]
    off = [f"algorithm.{name}" for name, where in KL_PLACES.items() if where == place and given.get(name) is False]
    same_source = ("algorithm.kl.in" in command_line) == (f"algorithm.{by.split()[0]}" in command_line)
    off += ["algorithm.kl.in"] if kl.get("in") == "off" and same_source else []
    remedy = "Keep one of the two; algorithm.kl.in: off turns it off"
    return place, [Problem(key, "off", f"algorithm.{by} asks for a KL in the {place}", remedy) for key in off]


def _weigh(kl: dict[str, Any], name: str, value: object, command_line: Collection[str]) -> list[Problem]:
    """Put the coefficient where it belongs, unless ``algorithm.kl.coef`` says another in the same place."""
    written, spelled = "algorithm.kl.coef", f"algorithm.{name}"
    if "coef" in kl and (written in command_line) == (spelled in command_line) and kl["coef"] != value:
        reason = f"{written} is {kl['coef']}, and both are the weight of the KL in the {KL_COEFS[name]}"
        return [Problem(spelled, value, reason, "Keep one of the two")]
    if written not in command_line:
        kl["coef"] = value
    return []


def place_others(tree: dict[Any, Any]) -> list[Problem]:
    """Make each beta an item of ``optim.betas``, and the switch of TensorBoard one of ``trainer.logger``.

    What contradicts them is refused. ``adv_estimator: ppo`` means gae with a critic, and ``dpo`` the loss that learns
    from pairs; a plug-in may have its own under these names.
    """
    section = tree.get("actor_rollout_ref")
    actor = section.get("actor") if isinstance(section, dict) else None
    optim = actor.get("optim") if isinstance(actor, dict) else None
    problems = _place_betas(optim) if isinstance(optim, dict) else []
    trainer = tree.get("trainer")
    switch = trainer.pop("use_tensorboard", False) if isinstance(trainer, dict) else False
    if not isinstance(switch, bool):
        remedy = "Write true, or trainer.logger: [console, tensorboard]"
        problems.append(Problem("trainer.use_tensorboard", switch, "not true or false", remedy))
    if isinstance(trainer, dict) and switch is True:
        names = trainer.get("logger", ["console"])
        names = [names] if isinstance(names, str) else list(names)
        trainer["logger"] = list(dict.fromkeys([*names, "tensorboard"]))
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, dict) or tree.get("plugins"):
        return problems
    if algorithm.get("adv_estimator") == "ppo":
        algorithm["adv_estimator"] = "gae"
        critic = tree.setdefault("critic", {}) or {}
        tree["critic"] = {"enable": True, **critic} if isinstance(critic, dict) else critic
    elif algorithm.get("adv_estimator") == "dpo" and "policy_loss" not in algorithm:
        del algorithm["adv_estimator"]
        algorithm["policy_loss"] = {"type": "dpo"}
    return problems


def _place_betas(optim: dict[Any, Any]) -> list[Problem]:
    """Make each beta an item of ``betas``; one that stands there with another value is a contradiction."""
    given, written = [optim.pop(name, None) for name in BETAS], optim.get("betas")
    if given == [None, None]:
        return []
    there = written if isinstance(written, list | tuple) else [0.9, 0.999]
    pairs = list(zip(BETAS, given, there, strict=False))
    optim["betas"] = [own if new is None else new for _, new, own in pairs]
    return [
        Problem(f"actor_rollout_ref.actor.optim.{name}", new, f"optim.betas has {own} for it", "Keep one of the two")
        for name, new, own in pairs
        if written is not None and new is not None and new != own
    ]


def choose_mode(modes: set[str], written: list[str], tree: dict[Any, Any]) -> list[Problem]:
    """Put the mode flags given on the command line into ``execution.mode``; ``written`` beside them says the same."""
    problems: list[Problem] = []
    if {"fully_async", "colocate"} <= modes and "hybrid" not in modes:
        reason = "the two are different modes, and together they are not a way to ask for the hybrid one"
        remedy = "Write --hybrid for separate devices with streaming, or only one of the two"
        problems.append(Problem("--fully-async --colocate", True, reason, remedy))
    elif modes:
        mode = "hybrid" if "hybrid" in modes else next(iter(modes))
        flag = f"--{mode.replace('_', '-')}"
        for other in written:
            if other != mode:
                reason = f"{flag} on the same command line asks for {mode}"
                problems.append(Problem("execution.mode", other, reason, "Write only one of the two"))
        execution = tree.setdefault("execution", {})
        if execution is None:
            execution = tree["execution"] = {}
        if isinstance(execution, dict):
            execution["mode"] = mode
    return problems


def drop_empty(tree: dict[Any, Any], root: type[BaseModel], path: tuple[str, ...] = ()) -> None:
    """Leave out mappings of which all lines are commented out (YAML gives null): all of it has its default."""
    for key, value in list(tree.items()):
        known = field_at(root, (*path, key)) if isinstance(key, str) else None
        if known is None or not known.nodes:
            continue
        if value is None and NoneType not in members(known.annotation):
            del tree[key]
        elif isinstance(value, dict):
            drop_empty(value, root, (*path, key))
