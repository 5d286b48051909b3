"""Environments of other packages, for whoever asks for their rows and for whoever plays them.

In the driver runs only what looks for a name, or starts a process.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tandem.base.errors import DataError
from tandem.base.regular import regular
from tandem.base.user_code import import_file

ROW = "verifiers"
"""The column, and the key of ``extra_info``, that holds the environment's own row."""

READ_S = 600.0
"""Deadline for the rows of an environment, which may be made or loaded."""

_LOADER = "load_environment"
_READ = "import sys; from tandem.base.environments import write_rows; write_rows(*sys.argv[1:])"


def lacks(package: str) -> bool:
    """Tell whether a package is missing. Nothing is imported."""
    return PathFinder.find_spec(package) is None


def wrong_environment(env: str) -> str | None:
    """Say why ``env`` can't be an environment of verifiers: a module's name, or a .py file; None where nothing speaks
    against it.
    """
    if not env.endswith(".py"):
        name = _module_of(env)
        return f"there is no module {name!r}" if lacks(name.partition(".")[0]) else None
    body = _statements(env)
    if isinstance(body, str):
        return body
    defined = {getattr(node, "name", None) for node in body}
    imported = {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    return None if _LOADER in defined | imported else f"it defines no function {_LOADER}"


def wrong_class(env: str) -> str | None:
    """Say why ``env`` can't be an environment of OpenEnv, ``module:Class`` or ``file.py:Class``; None where nothing
    speaks against it.
    """
    place, _, name = env.rpartition(":")
    if not place or not name.isidentifier():
        return "it names no class: that is MODULE:CLASS, or FILE.py:CLASS"
    if not place.endswith(".py"):
        return f"there is no module {place!r}" if lacks(place.partition(".")[0]) else None
    body = _statements(place)
    if isinstance(body, str):
        return f"{place} {body}"
    return None if any(getattr(node, "name", None) == name for node in body) else f"{place} defines no class {name}"


def _statements(file: str) -> list[ast.stmt] | str:
    """Return what stands at the top of a file of Python, or what is wrong with the file."""
    try:
        return ast.parse(regular(Path(file)).read_bytes()).body
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except (SyntaxError, ValueError) as error:
        return f"is not Python: {error}"


def load_environment(env: str, args: Mapping[str, Any]) -> Any:
    """Return the environment of verifiers that ``env`` names, made with ``args``.

    Whatever it raises passes through. Raises ``TypeError`` for what can't be played episode by episode.
    """
    module = import_file(env) if env.endswith(".py") else importlib.import_module(_module_of(env))
    loader = getattr(module, _LOADER, None)
    if loader is None:
        raise TypeError(f"{env} has no function {_LOADER}; tasksets of verifiers.v1 are no environments of this kind")
    made = loader(**args)
    base = importlib.import_module("verifiers").Environment
    if not isinstance(made, base):
        raise TypeError(f"{_LOADER} of {env} returned a {type(made).__name__}, and no environment of verifiers")
    if made.requires_group_rollouts:
        raise TypeError(f"the rubric of {env} compares the answers of a group, and episodes are scored one by one")
    return made


def _module_of(env: str) -> str:
    """Return the module of an environment by its id, as verifiers does: ``owner/my-env@0.1`` is ``my_env``."""
    return env.rpartition("/")[2].partition("@")[0].replace("-", "_")


def read_rows(env: str, args: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the environment's rows to train on (``train``) and, where it has some, those held out (``eval``).

    It is loaded in a process of its own, for it would take over the signals of this one. Raises ``DataError``.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-P", "-c", _READ, env, json.dumps(dict(args)), str(file)]
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        given = os.environ | {"PYTHONPATH": path}
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=READ_S, env=given
            )
        except subprocess.TimeoutExpired:
            raise DataError(f"the environment {env} gave no rows in {READ_S:g} s") from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise DataError(f"the environment {env} gave no rows: {last}")
        found: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
        return found


def write_rows(env: str, args: str, file: str) -> None:
    """Write the rows of an environment to ``file``; see ``read_rows``."""
    made = load_environment(env, json.loads(args))
    splits = {"train": made.build_dataset(), "eval": made.build_eval_dataset()}
    found = {name: [_row(row) for row in rows.to_list()] for name, rows in splits.items() if rows is not None}
    Path(file).write_text(json.dumps(found, default=str))


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an environment as one of Tandem's, with its own in the column ``ROW``."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):  # a table of messages has nulls where others say more
        prompt = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    own = {key: value for key, value in row.items() if key != "prompt" and value is not None}
    return {"prompt": prompt, "answer": row.get("answer") or "", ROW: own}
