"""Python files of the user's, named in a config."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.base.errors import ConfigError, Problem
from tandem.base.registry import near, read_signature
from tandem.base.user_files import module_name

IMPORT_S = 60.0
"""Deadline of the first import of a user's file, which may import torch and more."""

_TRIED = 77
_TRY = f"""
import os, sys
from tandem.base.user_code import import_file
try:
    import_file(sys.argv[1])
except BaseException:
    pass
os._exit({_TRIED})
"""


def import_file(file: str) -> ModuleType:
    """Run a Python file as a module of its own, once per process. Its folder is importable from then on (last).

    Other processes can import it under the same name, so what it defines can be sent to them.
    """
    path = Path(file).resolve()
    if importlib.util.spec_from_file_location("file", path) is None:
        raise ImportError(f"{path} is not a Python file (*.py)")
    return importlib.import_module(module_name(path))


def import_ends(file: str) -> str | None:
    """Return whether a Python file can be imported at all, tried in a process of its own: why not, else None.

    An exception is no obstacle: it can be caught. What ends the process or never comes to an end is.
    """
    command = [sys.executable, "-P", "-c", _TRY, str(Path(file).resolve())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
    try:
        status = child.wait(IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {IMPORT_S:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if status == _TRIED:
        return None
    ending = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    return f"importing it ends the process {ending}"


def import_problem(key: str, file: str, error: BaseException) -> Problem:
    """Return the place of the error in the user's file: the line of a syntax error, else the innermost frame in that
    file.
    """
    if isinstance(error, SyntaxError):
        reason = f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    else:
        path = str(Path(file).resolve())
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f"line {lines[-1]}" if lines else "an unknown line"
        reason = f"importing it fails at {where}: {type(error).__name__}: {error}"
    return Problem(key, file, reason, "Mend the file")


def load_class(file: str, name: str, parameters: Mapping[str, Any], *, key: str) -> object:
    """Return an object of the class ``name`` in ``file``, made with ``parameters``; ``key`` is where the config names
    it.

    Raises ``ConfigError`` for a file that isn't there or can't be run, a class that it doesn't define, and parameters
    that its constructor lacks or needs. An error of the constructor is one too.
    """
    if not Path(file).is_file():
        raise ConfigError([Problem(f"{key}.file", file, "there is no such file", "Write the path of a .py file")])
    try:
        module = import_file(file)
    except (Exception, SystemExit) as error:
        raise ConfigError([import_problem(f"{key}.file", file, error)]) from error
    classes = {k: v for k, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__}
    if name not in classes:
        reason = f"{file} defines no such class: {near(name, classes)}" if classes else f"{file} defines no class"
        raise ConfigError([Problem(f"{key}.type", name, reason, "Write the name of one of its classes")])
    known = read_signature(classes[name]).parameters
    problems = [
        Problem(f"{key}.{given}", value, f"{name} has no such parameter: {near(given, known)}", "Correct or remove it")
        for given, value in parameters.items()
        if given not in known
    ]
    problems += [
        Problem(f"{key}.{needed}", None, f"{name} needs this parameter", f"Write {key}.{needed}: ...")
        for needed, parameter in known.items()
        if parameter.required and needed not in parameters
    ]
    if problems:
        raise ConfigError(problems)
    try:
        made: object = classes[name](**parameters)
    except (Exception, SystemExit) as error:
        reason = f"{name} can't be made: {type(error).__name__}: {error}"
        raise ConfigError([Problem(f"{key}.type", name, reason, "Mend its constructor or its parameters")]) from error
    return made
