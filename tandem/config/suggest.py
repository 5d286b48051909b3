"""What to write instead of a key that there isn't."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from tandem.base.errors import Problem
from tandem.base.registry import near
from tandem.config.execution import ColocateExecution, FullyAsyncExecution, HybridExecution, Role
from tandem.config.tree import keys_of, members, nodes_of, paths_of

Path = tuple[str | int, ...]

MODES = {"colocate": ColocateExecution, "hybrid": HybridExecution, "fully_async": FullyAsyncExecution}

BALANCE_REASON = "--balance-data is not supported in pure fully-async mode"

ONLY_WITH_SEPARATE_DEVICES = {
    "max_staleness": "actor and rollout take turns there, every sample is of the newest weights: the staleness is 0",
    "num_iters_per_train_update": "a partition is trained as a whole there, nothing streams",
    "train_pipelining": "a partition is trained as a whole there, nothing streams",
}


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as the user writes it, such as ``data.train_files[0]``, from its parts."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def at(tree: Any, path: Sequence[object]) -> Any:
    """Return the value at ``path`` in nested dicts and lists; None where the path ends early."""
    for part in path:
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def node_at(root: type[BaseModel], path: Path, tree: Any) -> dict[str, Any]:
    """Return the keys that may stand below ``path``; of the execution modes, those of the mode that is chosen."""
    if path == ("execution",):
        mode = at(tree, ("execution", "mode"))
        return dict(keys_of(MODES.get(mode if isinstance(mode, str) else "", ColocateExecution)))
    return {
        key: info for known in types_at(root, path) for node in nodes_of(known) for key, info in keys_of(node).items()
    }


def types_at(root: type[BaseModel], path: Path) -> tuple[Any, ...]:
    """Return the types that may stand at ``path``, also inside lists; none where the schema has no such place."""
    types: tuple[Any, ...] = (root,)
    for part in path:
        if isinstance(part, int):
            types = tuple(m for known in types if get_origin(known) is list for m in members(get_args(known)[0]))
        else:
            infos = [keys_of(node).get(part) for known in types for node in nodes_of(known)]
            types = tuple(m for info in infos if info is not None for m in members(info.annotation))
    return types


def unknown_key(root: type[BaseModel], path: Path, value: object, tree: Any) -> Problem:
    """Return the problem of a key that the schema lacks, with the most likely one that was meant."""
    key = str(path[-1])
    if path[:-1] == ("execution",) and (lacking := _lacking(key, value, tree)):
        return lacking
    parent, siblings = _known_parent(root, path, tree)
    if len(parent) < len(path) - 1:  # the misspelling is further up
        path = path[: len(parent) + 1]
        key = str(path[-1])
    where = f"in {dotted(parent)}" if parent else "at the top level"
    return Problem(dotted(path), value, f"unknown key {key!r} {where}", _hint(root, path, key, siblings))


def closest(root: type[BaseModel], path: Path, tree: Any) -> str | None:
    """Return the one key of the same mapping that a misspelt last part of ``path`` most likely stands for."""
    names = get_args(Role) if path[:-1] == ("execution", "resource") else node_at(root, path[:-1], tree)
    found = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=0.6)
    return found[0] if found else None


def _known_parent(root: type[BaseModel], path: Path, tree: Any) -> tuple[Path, dict[str, Any]]:
    parent: Path = ()
    for end in range(1, len(path)):
        if not types_at(root, path[:end]):
            break
        parent = path[:end]
    return parent, node_at(root, parent, tree)


def _hint(root: type[BaseModel], path: Path, key: str, siblings: dict[str, Any]) -> str:
    hint = near(key, siblings)
    if path[:-1] == ("execution",) and not hint.startswith("did you mean"):
        hint = near(key, {name for mode in MODES.values() for name in keys_of(mode)})
    elsewhere = [found.path for found in paths_of(root).values() if found.key == key and found.path != dotted(path)]
    if hint.startswith("did you mean"):
        return f"D{hint[1:]}"
    if elsewhere:
        return "Did you mean " + " or ".join(repr(path) for path in elsewhere[:3]) + "?"
    return f"K{hint[1:]}" if siblings else "Nothing may stand below it"


def _lacking(key: str, value: object, tree: Any) -> Problem | None:
    """Return what another mode has and this one lacks."""
    mode = at(tree, ("execution", "mode")) or "colocate"
    having = [name for name, node in MODES.items() if key in keys_of(node)]
    if not having or mode in having or mode not in MODES:
        return None
    path = f"execution.{key}"
    if key == "balance_data":
        remedy = "Remove --balance-data, or use --hybrid (execution.mode: hybrid), which balances"
        return Problem(path, value, BALANCE_REASON, remedy)
    reason = f"{key} has no meaning in {mode}"
    if mode == "colocate" and key in ONLY_WITH_SEPARATE_DEVICES:
        reason += f": {ONLY_WITH_SEPARATE_DEVICES[key]}"
    return Problem(path, value, reason, f"Remove it, or write execution.mode: {' or '.join(having)}")
