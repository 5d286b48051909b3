"""The interpreter of an engine's own environment: what it must have there, which it is asked without importing any."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

from packaging.specifiers import SpecifierSet

from tandem.rollout.capabilities import EngineCapabilities

ANSWER_S = 10.0
"""Starting an interpreter and looking up versions takes a fraction of a second."""

USERS_LAST = """
import os, sys
given = [folder for folder in os.environ["PYTHONPATH"].split(os.pathsep) if folder]
own = [folder for folder in sys.path if folder not in given]
place = next((i for i, folder in enumerate(own) if folder.endswith("-packages")), len(own))
sys.path[:] = own[:place] + given + own[place:]
"""
"""Code for a program that is to find what ``PYTHONPATH`` names behind the standard library, as this process does: a
file of the user's may be called as a module of that.
"""

_QUESTION = f"""{USERS_LAST}
import json
from importlib import metadata, util
found = {{}}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({{"torch": util.find_spec("torch") is not None, "found": found}}))
"""


def fault_of_interpreter(python: str, capabilities: EngineCapabilities) -> str | None:
    """Return why an engine can't live in a process of the program ``python``; None where it can.

    The program is started once, with ``ANSWER_S`` seconds to answer.
    """
    names = () if capabilities.package is None else (capabilities.package, *capabilities.builds)
    answer = _ask(python, Path(python).stat().st_mtime_ns, names)
    if isinstance(answer, str):
        return answer
    torch, versions = answer
    found = next((versions[name] for name in names if name in versions), None)
    if names and found is None:
        return f"the engine needs the package {capabilities.requirement}, which is not installed there"
    if found is not None and not SpecifierSet(capabilities.versions).contains(found, prereleases=True):
        return f"the engine needs the package {capabilities.requirement}, and {found} is installed there"
    return None if torch else "an engine's process needs the package torch, which is not installed there"


def folders_of_the_user() -> list[str]:
    """Return ``sys.path`` without the packages of this interpreter, which would hide those of another."""
    return [folder or os.getcwd() for folder in sys.path if not _of_this_environment(folder or os.getcwd())]


@functools.lru_cache(maxsize=8)
def _ask(python: str, changed: int, names: tuple[str, ...]) -> tuple[bool, dict[str, str]] | str:
    """Return whether it has torch, and the versions of ``names``; why there is no answer. ``changed`` makes it another
    one.
    """
    del changed
    try:
        child = subprocess.Popen(
            [python, "-P", "-c", _QUESTION, *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders_of_the_user())},
        )
    except OSError as error:
        return f"it can't be started: {error.strerror}"
    try:
        words, _ = child.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"asked for its packages, it gave no answer within {ANSWER_S:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    last = next(reversed(words.strip().splitlines()), "")
    try:
        answer = json.loads(last)
        return bool(answer["torch"]), dict(answer["found"])
    except (ValueError, KeyError, TypeError):
        return f"it is no Python of version 3.11 or later; it answered {last[:120]!r}"


def _of_this_environment(folder: str) -> bool:
    """Return whether a folder of ``sys.path`` holds the packages of this interpreter, not modules of the user's."""
    own = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    place = Path(folder).resolve()
    return (
        place.suffix == ".zip"
        or bool(own & {place, *place.parents})
        or place.name in ("site-packages", "dist-packages")
    )
