"""Who teaches, whom, and whether a teacher can take the actor's place as a weight tag."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.base.regular import regular
from tandem.config.schema import Config
from tandem.plan.files.model import model_folder, read_model
from tandem.stages.facts import TEACHER

IGNORED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a ``config.json`` that change nothing in what given weights compute."""


@dataclass(frozen=True)
class Teacher:
    """A model to learn from. ``name`` is that of its tag or model; ``sources`` are the data sources that are its own.

    ``rest``: it teaches all others.
    """

    name: str
    path: str
    sources: tuple[str, ...]
    rest: bool


def uses_teacher(config: Config) -> bool:
    """Return whether anything is learned from a teacher: a coefficient of 0 means off."""
    teaching = config.algorithm.distillation
    return teaching is not None and teaching.coef > 0


def learns_from_reward(config: Config) -> bool:
    """Return whether the reward trains: not where a teacher is all that is learned from."""
    teaching = config.algorithm.distillation
    return not (uses_teacher(config) and teaching is not None and teaching.only)


def teachers(config: Config) -> tuple[Teacher, ...]:
    """Return every model that teaches, once; none where distillation is off."""
    if not uses_teacher(config):
        return ()
    section = config.actor_rollout_ref.teacher
    paths = dict.fromkeys([*([] if section.path is None else [section.path]), *section.by_source.values()])
    found = []
    for path in paths:
        own = tuple(source for source, named in section.by_source.items() if named == path)
        rest = path == section.path
        found.append(Teacher(TEACHER if rest else f"{TEACHER}:{own[0]}", path, own, rest))
    return tuple(found)


def teaches_as_tag(config: Config) -> bool:
    """Return whether the teachers are weight tags of the actor; else each is a model of its own."""
    return uses_teacher(config) and obstacle_to_tag(config) is None


def obstacle_to_tag(config: Config) -> str | None:
    """Return why the teachers can't be weight tags; None where they can."""
    model = config.actor_rollout_ref.model
    if config.execution.mode == "fully_async":
        return "in fully_async each role has weights of its own"
    if model.trains_adapters:
        return "with LoRA a tag holds adapters only, and a teacher has other base weights"
    own = _architecture(model.path)
    for teacher in teachers(config):
        theirs = _architecture(teacher.path)
        if own is None or theirs is None:
            return f"{teacher.path} and the actor's model can't be compared before they are loaded"
        for key in sorted(own.keys() | theirs.keys()):
            if own.get(key) != theirs.get(key):
                return f"{teacher.path} has {key} {theirs.get(key)}, the actor {own.get(key)}"
    return None


def taught_sources(config: Config) -> tuple[str, ...] | None:
    """Return the data sources that have a teacher; None where all have one, or need none."""
    section = config.actor_rollout_ref.teacher
    return tuple(section.by_source) if uses_teacher(config) and section.path is None else None


def teacher_parameters(config: Config) -> int | None:
    """Count the parameters of all teachers together; None where the files of one don't tell, or aren't here."""
    total = 0
    for teacher in teachers(config):
        folder, found = model_folder(teacher.path), None
        with suppress(OSError, ValueError):  # a problem of the plan says what is wrong with it
            found = None if folder is None else read_model(folder).parameters
        if found is None:
            return None
        total += found
    return total


def _architecture(path: str) -> dict[str, Any] | None:
    """Return what ``config.json`` says of the computation; None where there is none to be read."""
    folder = model_folder(path)
    try:
        content = None if folder is None else json.loads(regular(Path(folder) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return {k: v for k, v in content.items() if k not in IGNORED} if isinstance(content, dict) else None
