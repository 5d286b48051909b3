"""From the words of a command line to a plan, with the problems of both the document and its meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.base.errors import ConfigError, DataError, Problem
from tandem.config.load import InvalidConfigError, load_config, load_words
from tandem.config.schema import Config, SftConfig
from tandem.observe.metrics import CONFIG_FILE
from tandem.plan.plan import Plan, compile_plan
from tandem.plan.sft import SftPlan, compile_sft_plan

Source = str | Path | Mapping[str, Any] | None


@dataclass(frozen=True)
class NoPlan:
    """What is left of a plan where the document itself can't be read."""

    problems: tuple[Problem, ...]

    @property
    def runs(self) -> bool:
        """Always False: nothing runs without a document."""
        return False

    def to_json(self) -> str:
        """Return the problems as JSON, for machines; without secrets."""
        shown = NoPlan(tuple(problem.hidden() for problem in self.problems))
        return json.dumps({"kind": None, **asdict(shown)}, default=repr, ensure_ascii=False, indent=2)


def a_config_in(words: Sequence[str] | None) -> Sequence[str]:
    """Return ``words`` where there are any. Raises ``DataError`` that says where a first config comes from."""
    if not words:
        begin = "`tandem init quickstart` copies an example that runs here, `tandem init train --out run.yaml` writes a"
        raise DataError(f"no config is named. {begin} commented one; then name it: tandem plan run.yaml")
    return words


def plan_words(words: Sequence[str]) -> Plan | SftPlan | NoPlan:
    """Return the plan of whichever document the words name."""
    try:
        return _compile(load_words(words))
    except InvalidConfigError as error:
        return NoPlan(tuple(_all_problems(error)))


def runnable_train(words: Sequence[str], source: Source = None) -> tuple[Config, Plan]:
    """Return the config and plan of a run that may start; ``source`` is a document beside the words.

    Raises ``ConfigError`` with all that speaks against it.
    """
    try:
        config = load_words(words, Config) if source is None else load_config(source, words, kind=Config)
    except InvalidConfigError as error:
        raise ConfigError(_all_problems(error)) from None
    compiled = compile_plan(config)
    compiled.require_runnable()
    return config, compiled


def runnable_sft(words: Sequence[str], source: Source = None) -> tuple[SftConfig, SftPlan]:
    """Return the config and plan of an SFT run that may start. Raises ``ConfigError`` with all that speaks against
    it.
    """
    try:
        config = load_words(words, SftConfig) if source is None else load_config(source, words, kind=SftConfig)
    except InvalidConfigError as error:
        raise ConfigError(_all_problems(error)) from None
    compiled = compile_sft_plan(config)
    compiled.require_runnable()
    return config, compiled


def check_evaluated(source: Path, words: Sequence[str]) -> None:
    """Refuse what ``tandem eval`` can't use, before anything heavy is imported."""
    if not source.exists():
        raise DataError(f"{source}: there is no such run or config; name a run's trainer.output_dir, or a YAML file")
    if source.is_dir() and not (source / CONFIG_FILE).is_file():
        raise DataError(f"{source} holds no {CONFIG_FILE}, which every run writes; name a run's trainer.output_dir")
    try:
        load_config(source / CONFIG_FILE if source.is_dir() else source, words)
    except InvalidConfigError as error:
        raise ConfigError(_all_problems(error)) from None


def _compile(config: Config | SftConfig) -> Plan | SftPlan:
    return compile_plan(config) if isinstance(config, Config) else compile_sft_plan(config)


def _all_problems(error: InvalidConfigError) -> list[Problem]:
    """Return the problems of the document, then those that remain if it is read as it was most likely meant."""
    if error.guess is None:
        return error.problems
    reported = {problem.key for problem in error.problems}
    further = [problem for problem in _compile(error.guess).problems if problem.key not in reported]
    return [*error.problems, *further]
