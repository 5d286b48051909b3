"""Other ways to write the same thing, brought to the one spelling of the schema before it is validated."""

from __future__ import annotations

from types import NoneType
from typing import Any

from pydantic import BaseModel

from tandem.base.errors import Problem
from tandem.config.tree import field_at, members

KL_PLACES = {"use_kl_loss": "loss", "use_kl_in_reward": "reward"}


def place_kl(tree: dict[Any, Any]) -> list[Problem]:
    """``algorithm.use_kl_loss`` and ``algorithm.use_kl_in_reward`` become ``algorithm.kl.in``; both are refused."""
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, dict):
        return []
    problems: list[Problem] = []
    wanted: dict[str, str] = {}
    for key, place in KL_PLACES.items():
        value = algorithm.pop(key, False)
        if not isinstance(value, bool):
            reason = "not true or false"
            problems.append(
                Problem(f"algorithm.{key}", value, reason, f"Write algorithm.kl.in: {place}, or leave it out")
            )
        elif value:
            wanted[key] = place
    if not wanted:
        return problems
    kl = algorithm.get("kl")
    if kl is None:
        kl = algorithm["kl"] = {}
    if not isinstance(kl, dict):
        return problems  # the validation says what is wrong with it
    written = kl.get("in", "off")
    places = set(wanted.values()) | ({written} if written in KL_PLACES.values() else set())
    if len(places) > 1:
        reason = "a KL in both the loss and the reward penalises the same thing twice"
        remedy = "Choose one: algorithm.kl.in: loss, or algorithm.kl.in: reward"
        problems.append(Problem("algorithm.kl.in", sorted(places), reason, remedy))
        kl["in"] = "loss"
    else:
        kl["in"] = places.pop()
    return problems


def choose_mode(modes: set[str], written: list[str], tree: dict[Any, Any]) -> list[Problem]:
    """The mode flags given on the command line, put into ``execution.mode``; ``written`` beside them says the same."""
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
