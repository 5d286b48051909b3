"""From a YAML file and a command line to a validated config, or to all problems at once."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import ValidationError

from tandem.base.errors import ConfigError, Problem
from tandem.config.arguments import Arguments, Assignment, read_arguments
from tandem.config.document import LARGEST, DocumentError, read_document
from tandem.config.explain import EXPECTED, Fault, explain, intended
from tandem.config.overrides import as_words, assign, two_values
from tandem.config.schema import Config, SftConfig
from tandem.config.spellings import choose_mode, drop_empty, place_kl, place_others
from tandem.config.suggest import at, closest
from tandem.config.tree import keys_of

C = TypeVar("C", Config, SftConfig)

Kind = type[Config] | type[SftConfig]
Source = str | Path | Mapping[str, Any] | None

COMMANDS: dict[Kind, str] = {Config: "tandem train", SftConfig: "tandem sft"}
MODE = "execution.mode"
REPAIRS = 8


class InvalidConfigError(ConfigError):
    """A config that can't be read as it stands.

    ``guess`` is the config that was most likely meant (None where there is no telling): whoever checks further can look
    for the rest of the problems in it, so that the user sees them all at once. It is never run.
    """

    def __init__(self, problems: list[Problem], guess: Config | SftConfig | None = None) -> None:
        super().__init__(problems)
        self.guess = guess


@overload
def load_config(source: Source, overrides: Sequence[str] | str = (), *, kind: type[C], **keys: object) -> C: ...
@overload
def load_config(
    source: Source, overrides: Sequence[str] | str = (), *, kind: None = None, **keys: object
) -> Config | SftConfig: ...
def load_config(
    source: Source, overrides: Sequence[str] | str = (), *, kind: Any = None, **keys: object
) -> Config | SftConfig:
    """Load the config of ``source``, validated: a YAML file, the mappings that one would hold, or None: only what the
    rest says.

    ``overrides`` are words of the command line, ``key=value`` or ``--flag value``, applied in order; a single text is
    split as a shell does. ``keys`` are the same as arguments: flags, sections. The document may be a training run or an
    SFT run; which one is told from its keys, unless ``kind`` demands one.

    Raises:
        InvalidConfigError: with all problems, each naming key, value, reason and remedy.

    >>> model, data = {"path": "models/tiny"}, {"train_files": ["train.jsonl"]}
    >>> document = {"actor_rollout_ref": {"model": model}}
    >>> config = load_config(document, "--n-samples-per-prompt 4", kind=Config, data=data)
    >>> config.actor_rollout_ref.rollout.n, config.data.train_files
    (4, ['train.jsonl'])
    """
    words = as_words(overrides, keys, kind or Config)
    if isinstance(source, Mapping):
        config: Config | SftConfig = _load(words, kind, _plain_tree(source))
    else:
        config = load_words(words if source is None else [str(source), *words], kind)
    return config


def _plain_tree(value: Any) -> Any:
    """Return mappings, sequences and paths as a YAML document would hold them."""
    if isinstance(value, Mapping):
        return {key: _plain_tree(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_tree(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@overload
def load_words(words: Sequence[str], kind: type[C]) -> C: ...
@overload
def load_words(words: Sequence[str], kind: Kind | None = None) -> Config | SftConfig: ...
def load_words(words: Sequence[str], kind: Any = None) -> Config | SftConfig:
    """Load the config of a whole command line: ``[run.yaml] [key=value ...] [--flag value ...]``."""
    config: Config | SftConfig = _load(words, kind, None)
    return config


def _load(words: Sequence[str], kind: Any, document: dict[Any, Any] | None) -> Any:
    """Load the config of a command line; ``document`` stands for its file."""
    arguments = read_arguments(words, kind or Config)
    tree, problems = _read_file(arguments) if document is None else (document, _files_beside(arguments, 0))
    roots = {assignment.path.partition(".")[0]: None for assignment in arguments.assignments}
    if kind is None and kind_of(tree or roots) is SftConfig:
        kind = SftConfig
        arguments = read_arguments(words, kind)
    kind = kind or Config
    if tree and kind_of(tree) is not kind:
        name = str(arguments.files[0]) if arguments.files else "the config"
        raise InvalidConfigError([_wrong_command(name, tree, kind)])
    problems += [*arguments.problems, *two_values(arguments.assignments)]
    written = [assignment.text for assignment in arguments.assignments if assignment.path == MODE]
    problems += choose_mode(arguments.modes, written, tree)
    for assignment in _mode_first(arguments):
        problems += assign(tree, assignment, kind)
    return _validate(tree, kind, problems, [assignment.path for assignment in arguments.assignments])


def _mode_first(arguments: Arguments) -> list[Assignment]:
    """Return the assignments in order, except that the mode decides which other keys there are, and that its flags
    win.
    """
    assignments = sorted(arguments.assignments, key=lambda assignment: assignment.path != MODE)
    return [assignment for assignment in assignments if not arguments.modes or assignment.path != MODE]


def config_from_tree(tree: dict[Any, Any], kind: type[C]) -> C:
    """Return a config from nested dicts, with the errors of one from a file."""
    config = _validate(copy.deepcopy(tree), kind, [])
    assert isinstance(config, kind)
    return config


def _wrong_command(name: str, tree: dict[Any, Any], kind: Kind) -> Problem:
    reason = f"not a config of {COMMANDS[kind]}"
    return Problem(name, sorted(map(str, tree)), reason, f"Use {COMMANDS[kind_of(tree)]} for it")


def kind_of(tree: dict[Any, Any]) -> Kind:
    """Return which document has these top-level keys, misspelt ones included."""
    only_sft = set(keys_of(SftConfig)) - set(keys_of(Config))
    only_train = set(keys_of(Config)) - set(keys_of(SftConfig))
    votes = 0
    for key in map(str, tree):
        found = difflib.get_close_matches(key, only_sft | only_train, n=1, cutoff=0.7)
        votes += 0 if not found else 1 if found[0] in only_sft else -1
    return SftConfig if votes > 0 else Config


def _read_file(arguments: Arguments) -> tuple[dict[Any, Any], list[Problem]]:
    problems = _files_beside(arguments, 1)
    if not arguments.files:
        return {}, problems
    try:
        return read_document(arguments.files[0]), problems
    except DocumentError as error:
        raise InvalidConfigError([error.problem, *problems, *arguments.problems]) from None


def _files_beside(arguments: Arguments, allowed: int) -> list[Problem]:
    reason, remedy = "a second config file", "Give one YAML file; other words are key=value or --flag value"
    return [Problem("arguments", str(extra), reason, remedy) for extra in arguments.files[allowed:]]


def _validate(
    tree: dict[Any, Any], kind: Kind, problems: list[Problem], command_line: Sequence[str] = ()
) -> Config | SftConfig:
    too_large = list(_oversized(tree))
    if too_large:
        raise InvalidConfigError([*problems, *too_large])
    problems = list(problems)
    if kind is Config:
        problems += place_kl(tree, command_line)
        problems += place_others(tree)
    drop_empty(tree, kind)
    try:
        config = kind.model_validate(tree)
    except ValidationError as error:
        faults = explain(error, tree, kind)
        problems += [fault.problem for fault in faults]
        raise InvalidConfigError(problems, _guess(tree, kind, faults)) from None
    if problems:
        raise InvalidConfigError(problems, config)
    return config


def _oversized(tree: Any, key: str = "") -> Iterator[Problem]:
    """Yield a problem for each integer that no arithmetic here could carry: a tree of dicts never was a document."""
    if isinstance(tree, int) and abs(tree) > LARGEST:
        yield Problem(key, "...", f"an integer of {tree.bit_length()} bits", "Write a smaller number")
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _oversized(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _oversized(value, f"{key}[{index}]")


def _guess(tree: dict[Any, Any], kind: Kind, faults: list[Fault]) -> Config | SftConfig | None:
    """Return the config that was most likely meant: misspelt keys corrected, ``'2'`` read as 2, the rest left at
    defaults.
    """
    tree = copy.deepcopy(tree)
    for _ in range(REPAIRS):
        for fault in faults:
            _repair(tree, kind, fault)
        try:
            return kind.model_validate(tree)
        except ValidationError as error:
            faults = explain(error, tree, kind)
    return None


def _repair(tree: dict[Any, Any], kind: Kind, fault: Fault) -> None:
    path = list(fault.path)
    meant = intended(at(tree, path), EXPECTED.get(fault.kind, ""))
    parent = at(tree, path[:-1])
    if meant is not None and isinstance(parent, dict | list):
        parent[path[-1]] = meant  # type: ignore[index]
        return
    while path and isinstance(path[-1], int) and fault.kind != "invalid_key":
        path.pop()  # an item of a list: give up the whole list
    parent = at(tree, path[:-1])
    if not path or not isinstance(parent, dict):
        return
    value = parent.pop(path[-1], None)
    if fault.kind == "extra_forbidden":
        name = closest(kind, tuple(path), tree)
        if name is not None and name not in parent:
            parent[name] = value
    elif fault.kind == "missing" and path[-1] == "path":
        parent["path"] = "unknown/model"
