"""Environments of other packages: whether the package and the environment are there. Nothing of them is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.base.environments import ROW, lacks, wrong_class, wrong_environment
from tandem.base.errors import Problem
from tandem.base.registry import near, read_signature
from tandem.config.schema import Config, SourceConfig
from tandem.data.environment_rows import SOURCES
from tandem.plan.checks.parameters import check_parameters

SOURCE = "data.source"


def check_verifiers(key: str, type_: str, parameters: Mapping[str, Any]) -> Iterator[Problem]:
    """Report a missing package ``verifiers``, else an environment that isn't there. ``key`` is the section."""
    env = parameters.get("env")
    if lacks("verifiers"):
        reason = "it needs the package verifiers, which is not installed here"
        yield Problem(f"{key}.type", type_, reason, "Run pip install 'tandem-rl[verifiers]'")
    elif isinstance(env, str) and (wrong := wrong_environment(env)) is not None:
        remedy = "Install the environment's package, or write the path of a .py file that defines load_environment"
        yield Problem(f"{key}.env", env, wrong, remedy)


def check_openenv(key: str, parameters: Mapping[str, Any]) -> Iterator[Problem]:
    """Report a missing package ``openenv``, else a class that isn't there. ``key`` is the section."""
    env = parameters.get("env")
    if lacks("openenv"):
        reason = "it needs the package openenv, which is not installed here"
        yield Problem(f"{key}.type", "openenv", reason, "Run pip install 'tandem-rl[openenv]' (docs/episodes.md)")
    elif isinstance(env, str) and (wrong := wrong_class(env)) is not None:
        remedy = "Install the environment's package and write MODULE:CLASS, or write FILE.py:CLASS"
        yield Problem(f"{key}.env", env, wrong, remedy)


def check_built_in_source(source: SourceConfig) -> Iterator[Problem]:
    """Report what is wrong with a data source without a file."""
    if source.type not in SOURCES:
        remedy = f"Write {SOURCE}.file, the .py file that defines it"
        reason = f"there is no built-in data source {source.type!r}: {near(source.type, SOURCES)}"
        yield Problem(f"{SOURCE}.type", source.type, reason, remedy)
        return
    signature = read_signature(SOURCES[source.type])
    yield from check_parameters(SOURCE, "data source", source.type, source.parameters, signature, ("type", "file"))
    yield from check_verifiers(SOURCE, source.type, source.parameters)


def check_own_rows(config: Config) -> Iterator[Problem]:
    """Report that the environment's own rows don't get to its episodes."""
    source, episode = config.data.source, config.actor_rollout_ref.rollout.episode
    built_in = ("verifiers", None)
    if source is None or (source.type, source.file) != built_in or (episode.type, episode.file) != built_in:
        return
    if ROW not in config.data.extra_keys:
        reason = f"the environment's own rows are in the column {ROW}, which its episodes don't get"
        yield Problem("data.extra_keys", config.data.extra_keys, reason, f"Write data.extra_keys: [{ROW}]")
