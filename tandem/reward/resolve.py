"""From ``{type: NAME, file: FILE, ...parameters}`` to a scorer."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.base.errors import ConfigError, Problem
from tandem.base.registry import near
from tandem.base.user_code import import_ends, import_file, import_problem
from tandem.reward.combined import Combined, joint_style
from tandem.reward.parts import read_parts
from tandem.reward.registry import REWARDS, ScorerTarget, call_style
from tandem.reward.scorers import built_in as _built_in  # noqa: F401  (registers them)
from tandem.reward.scoring import Scorer, ScorerSpec, bind_target
from tandem.reward.static import candidate_names, describe


def resolve(
    type_: str, file: str | None = None, parameters: Mapping[str, Any] | None = None, plugins: Sequence[str] = ()
) -> ScorerSpec:
    """Find the scorer ``type`` by running what defines it.

    With ``file`` (a path) that is the function or class ``type``, ``CamelCase`` or ``CamelCaseManager`` of the file,
    or what the file registers under ``type``. Else it is the registered entry, or such a class or function of the
    modules in ``plugins``, which must be imported already.

    Raises ``ConfigError`` naming the key, the value and what to write: an unknown type with the near ones; a file that
    isn't there, or can't be imported with file, line and message; parameters that the scorer lacks or needs.
    """
    parameters = dict(parameters or {})
    module, attribute = _locate(type_, file, plugins)
    path = None if file is None else str(Path(file).resolve())
    target = _load(module, attribute, type_)
    found = problems(type_, file, parameters, plugins)
    if found:
        raise ConfigError(found)
    if not (inspect.isclass(target) and issubclass(target, Combined)):
        packages = _packages(type_) if type_ in REWARDS and REWARDS[type_].target is target else ()
        return ScorerSpec(type_, module.__name__, attribute, call_style(target, type_), path, parameters, packages)
    parts = read_parts(type_, file, parameters, "reward_manager")
    assert not isinstance(parts, Problem)
    inner = tuple((part, resolve(part.type, part.file, part.parameters, plugins)) for part in parts)
    call = joint_style([spec.call for _, spec in inner], target.fields)
    return ScorerSpec(type_, module.__name__, attribute, call, path, parts=inner)


def bind(spec: ScorerSpec) -> Scorer:
    """Load the code of ``spec`` here and construct the scorer; what the user's code raises passes through."""
    for package in spec.packages:
        importlib.import_module(package)
    module = import_file(spec.file) if spec.file is not None else importlib.import_module(spec.module)
    target = _load(module, spec.attribute, spec.type)
    if not spec.parts:
        return bind_target(target, spec.type, spec.parameters)
    combined: Scorer = target([(part, bind(inner)) for part, inner in spec.parts])
    return combined


def problems(
    type_: str,
    file: str | None,
    parameters: Mapping[str, Any],
    plugins: Sequence[str] = (),
    *,
    key: str = "reward_manager",
) -> list[Problem]:
    """Return every contradiction between a reward's YAML and the scorer's signature, parts of a sum included. Runs no
    file.
    """
    signature = describe(type_, file, plugins)
    if isinstance(signature, str):
        at, value = (f"{key}.type", type_) if file is None or Path(file).is_file() else (f"{key}.file", file)
        return [Problem(at, value, signature, "Write the name of a scorer and, for your own, the file that defines it")]
    known = signature.parameters
    found = [
        Problem(
            f"{key}.{name}",
            value,
            f"reward {type_!r} has no such parameter: {near(name, known) if known else 'it takes none'}",
            "Correct the name or leave the line out",
        )
        for name, value in parameters.items()
        if name not in known and not signature.accepts_any
    ]
    missing = [name for name, p in known.items() if p.required and name not in parameters]
    found += [
        Problem(f"{key}.{name}", None, f"reward {type_!r} needs this parameter", f"Write {key}.{name}: ...")
        for name in missing
    ]
    if file is None and type_ in REWARDS:
        missing = [package for package in _packages(type_) if importlib.util.find_spec(package) is None]
        found += [
            Problem(f"{key}.type", type_, f"it needs the package {name}", f"Install it: pip install {name}")
            for name in (package.replace("_", "-") for package in missing)
        ]
    if not found:
        parts = read_parts(type_, file, parameters, key)
        if isinstance(parts, Problem):
            return [parts]
        for part in parts:
            found += problems(part.type, part.file, part.parameters, plugins, key=part.key)
    return found


def _locate(type_: str, file: str | None, plugins: Sequence[str]) -> tuple[ModuleType, str]:
    """Return the module that defines the scorer and its name there; an empty name for one known only by
    registration.
    """
    if file is not None:
        return _locate_in_file(type_, file)
    if type_ in REWARDS:
        target = REWARDS[type_].target
        module = sys.modules[target.__module__]
        name = getattr(target, "__name__", "")
        return module, name if getattr(module, name, None) is target else ""
    if "." in type_ and not isinstance(describe(type_), str):
        at, _, type_ = type_.rpartition(".")
        try:
            importlib.import_module(at)
        except (Exception, SystemExit) as error:
            reason = f"importing {at} fails: {type(error).__name__}: {error}"
            raise ConfigError([Problem("reward_manager.type", f"{at}.{type_}", reason, "Mend the module")]) from error
        plugins = (at,)
    for plugin in plugins:
        module = sys.modules[plugin]
        for name in candidate_names(type_):
            if callable(getattr(module, name, None)):
                return module, name
    unknown = describe(type_)
    reason = str(unknown) + (f" (imported were {', '.join(plugins)})" if plugins else "")
    raise ConfigError([Problem("reward_manager.type", type_, reason, "Write a known name, or file: FILE for your own")])


def _locate_in_file(type_: str, file: str) -> tuple[ModuleType, str]:
    signature, is_there = describe(type_, file), Path(file).is_file()
    if is_there and (reason := _import_ends(str(Path(file).resolve()), Path(file).stat().st_mtime_ns)) is not None:
        remedy = "Mend the file; what takes long belongs into a class's constructor"
        raise ConfigError([Problem("reward_manager.file", file, reason, remedy)])
    try:
        module = import_file(file) if is_there else None
    except (Exception, SystemExit) as error:
        raise ConfigError([import_problem("reward_manager.file", file, error)]) from error
    if module is not None:
        for name in candidate_names(type_):
            if callable(getattr(module, name, None)):
                return module, name
        if type_ in REWARDS and REWARDS[type_].target.__module__ == module.__name__:
            return module, ""
    reason = signature if isinstance(signature, str) else f"running {file} defines no such function or class"
    at, value = ("reward_manager.type", type_) if module is not None else ("reward_manager.file", file)
    raise ConfigError([Problem(at, value, reason, "Write the name of a scorer and the file that defines it")])


@functools.cache
def _import_ends(file: str, modified_ns: int) -> str | None:
    """Return the fault of a file that can't be imported; asked once for each, since it costs a process."""
    return import_ends(file)


def _packages(type_: str) -> tuple[str, ...]:
    packages = REWARDS[type_].traits["packages"]
    assert isinstance(packages, tuple)
    return packages


def _load(module: ModuleType, attribute: str, type_: str) -> ScorerTarget:
    target: ScorerTarget = getattr(module, attribute) if attribute else REWARDS[type_].target
    return target
