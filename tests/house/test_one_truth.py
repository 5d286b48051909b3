"""What follows from a config is decided once, by the plan, and asked of it: nobody else looks at modes."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODES = {"colocate", "hybrid", "fully_async"}
KINDS = {"ColocateExecution", "HybridExecution", "FullyAsyncExecution"}
OF_A_MODE = {
    "balance_data",
    "hybrid_engine",
    "max_staleness",
    "num_iters_per_train_update",
    "on_weight_update",
    "train_pipelining",
}
"""Keys of the config that not every mode has, or that mean nothing in one: ``plan.flow`` says what they come to."""

DECIDED = {
    "choose_runtime",
    "learns_from_reward",
    "learns_preferences",
    "mini_batch_prompts",
    "old_logprobs_from",
    "plan_critic",
    "plan_flow",
    "plan_tags",
    "pushed_part",
    "shares_weights",
    "untrained_steps",
    "uses_reference",
    "uses_teacher",
}
"""Questions about the whole config. A plan holds their answers."""

DECIDERS = {"config", "plan", "speed"}
"""Layers that may ask them. The speed model's subject is the modes."""


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    files = sorted((ROOT / "tandem").rglob("*.py"))
    return [(file.relative_to(ROOT / "tandem"), ast.parse(file.read_text("utf-8"))) for file in files]


@cache
def definitions() -> dict[str, list[Path]]:
    """Where each function is defined."""
    found = defaultdict[str, list[Path]](list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found[node.name].append(path)
    return found


def words_of(node: ast.AST) -> set[object]:
    return {found.value for found in ast.walk(node) if isinstance(found, ast.Constant) and isinstance(found.value, str)}


def looks_at_modes(tree: ast.AST) -> list[int]:
    """Lines that compare with the name of a mode, name its class, or read a key that only some modes have."""
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Compare) and words_of(node) & MODES)
        or (isinstance(node, ast.MatchValue) and words_of(node) & MODES)
        or (isinstance(node, ast.Name) and node.id in KINDS)
        or (isinstance(node, ast.Attribute) and node.attr in OF_A_MODE and reads_config(node))
    )


def reads_config(node: ast.Attribute) -> bool:
    """Whether the attribute is taken of a section of the config, whatever variable that is in."""
    return ast.unparse(node.value).split(".")[-1].strip("_") in {"execution", "rollout", "actor_rollout_ref", "config"}


@pytest.mark.parametrize(
    "line",
    [
        "if execution.mode == 'hybrid': pass",
        "balance = 'fully_async' != mode",
        "apart = mode in ('hybrid', 'fully_async')",
        "match mode:\n    case 'colocate': pass",
        "assert isinstance(execution, HybridExecution)",
        "staleness = parts.config.execution.max_staleness",
        "update = self._config.actor_rollout_ref.rollout.on_weight_update",
    ],
)
def test_a_look_at_the_mode_is_seen(line: str) -> None:
    assert looks_at_modes(ast.parse(line))


def test_only_the_plan_and_the_speed_model_look_at_modes() -> None:
    looked = {str(path): looks_at_modes(tree) for path, tree in modules() if path.parts[0] not in DECIDERS}
    assert {path: lines for path, lines in looked.items() if lines} == {}


@pytest.mark.parametrize("question", sorted(DECIDED))
def test_each_question_about_a_config_is_answered_in_one_place(question: str) -> None:
    (defined,) = definitions()[question]
    assert defined.parts[0] == "plan"


def test_what_runs_asks_the_plan() -> None:
    asked = {
        str(path): sorted(names)
        for path, tree in modules()
        if path.parts[0] not in DECIDERS
        and (
            names := {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem.plan")
                for alias in node.names
            }
            & DECIDED
        )
    }
    assert asked == {}
