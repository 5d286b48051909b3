"""Command-line words: ``[run.yaml] [key=value ...] [--flag value ...]``, sorted by what they are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from tandem.base.errors import Problem
from tandem.base.registry import near
from tandem.config.flags import MODE_FLAGS, SFT_FLAGS, TRAIN_FLAGS
from tandem.config.foreign import Foreign, foreign_flag
from tandem.config.schema import SftConfig
from tandem.config.spellings import SPELLINGS, SWITCHES
from tandem.config.trainer import LATEST
from tandem.config.tree import field_at, is_bool, is_free, paths_of

ASSIGNMENT = re.compile(r"([+~]*)([A-Za-z_][\w\-]*(?:\.[\w\-]+)*)=(.*)", re.DOTALL)
_DASHES = "-‐‑‒–—―−"
_UNSEEN = re.compile("[\u200b-\u200f\u2060\ufeff]")
SWITCH_WORDS = ("true", "false")
YAML_SUFFIXES = (".yaml", ".yml")
CONFIG_FLAGS = ("config_path", "config")
"""Flags that name the config file."""
RESUME = "trainer.resume"
BARE_VALUES = {RESUME: LATEST}
"""What a flag means that is written without a value."""


@dataclass(frozen=True)
class Assignment:
    """``path`` gets the value written as ``text``; ``spelling`` is how the command line names it."""

    path: str
    text: str
    spelling: str


@dataclass
class Arguments:
    """What a command line says about the config."""

    files: list[Path] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    modes: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def read_arguments(words: Sequence[str], root: type[BaseModel]) -> Arguments:
    """Sort the words of a command line by what they are; ``root`` is the document that they are about."""
    reader = _Reader(words, root)
    while reader.words:
        reader.read_one()
    return reader.found


def without_resume(words: Sequence[str]) -> list[str]:
    """Return the words of a command line but for those that say what the run goes on from."""
    kept: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        if name not in (RESUME, "resume") or not (equals or word.startswith("--")):
            kept.append(word)
        elif not equals and left and not left[0].startswith("--") and ASSIGNMENT.fullmatch(left[0]) is None:
            left.pop(0)
    return kept


def _slip(word: str) -> Problem | None:
    """Return the problem of a word that is neither a file nor ``key=value`` nor a flag, and nearly one; None where it
    may name a file.
    """
    if word.endswith(YAML_SUFFIXES) or (word and os.path.lexists(word)):
        return None
    if not word:
        return Problem("arguments", word, "an empty word, as a variable that isn't set leaves it", "Leave it out")
    if word[0] in _DASHES:
        meant = f"--{word.lstrip(_DASHES)}"
        return Problem("arguments", word, "no flag: one begins with two hyphens", f"Write {meant}")
    key, equals, value = _UNSEEN.sub("", word).replace("＝", "=", 1).partition("=")
    if not equals:
        return None
    meant = f"{key.strip()}={value.strip()}"
    if ASSIGNMENT.fullmatch(meant) is not None:
        return Problem("arguments", word, "no key=value, though it looks like one", f"Write {meant}")
    remedy = "Write a whole list, such as key=[a, b]" if key.strip().endswith("]") else "Write key=value"
    return Problem("arguments", word, f"{key!r} is no key, which is of words with dots between them", remedy)


class _Reader:
    """Takes words from the front; a flag may take a second one as its value."""

    def __init__(self, words: Sequence[str], root: type[BaseModel]) -> None:
        self.words = list(words)
        self.root = root
        self.aliases = SFT_FLAGS if root is SftConfig else TRAIN_FLAGS
        self.modes = () if root is SftConfig else MODE_FLAGS
        self.extra = () if root is SftConfig else SPELLINGS
        self.found = Arguments()

    def read_one(self) -> None:
        """Read one file, assignment or flag."""
        word = self.words.pop(0)
        match = ASSIGNMENT.fullmatch(word)
        if word.startswith("--"):
            self._read_flag(word)
        elif match is None and (slip := _slip(word)) is not None:
            self.found.problems.append(slip)
        elif match is None:
            self.found.files.append(Path(word))
        elif match[1]:
            self.found.problems.append(self._marked(*match.groups()))
        else:
            self.found.assignments.append(Assignment(match[2], match[3], match[2]))

    def _read_flag(self, word: str) -> None:
        name, equals, text = word[2:].partition("=")
        given = text if equals else None
        key = name.replace("-", "_")
        negated = not self._is_known(key) and key.startswith("no_") and self._is_switch(key.removeprefix("no_"))
        if negated:
            key = key.removeprefix("no_")
        path = self.aliases.get(key, key)
        spelling = path if key == path else f"--{key.replace('_', '-')}"
        if key in CONFIG_FLAGS and self.root is not None:
            file = self._take_value(given) or (self.words.pop(0) if self.words else "")
            self.found.files.append(Path(file))
        elif not self._is_known(key) and (foreign := self._foreign(key)) is not None:
            self._read_foreign(name, foreign, given)
        elif not self._is_known(key):
            self.found.problems.append(self._unknown(name))
            self._take_value(given)
        elif self._is_switch(key):
            on = self._take_switch(f"--{name}", given) is not negated
            if key not in self.modes:
                self.found.assignments.append(Assignment(path, str(on).lower(), spelling))
            elif on:
                self.found.modes.add(key)
        else:
            bare = path in BARE_VALUES and given is None and self._assignment_follows()
            value = None if bare else self._take_value(given)
            if value is None and path in BARE_VALUES:
                value = BARE_VALUES[path]
            if value is None:
                remedy = f"Write --{name} VALUE"
                self.found.problems.append(Problem(f"--{name}", None, "the flag needs a value", remedy))
            else:
                self.found.assignments.append(Assignment(path, value, spelling))

    def _foreign(self, key: str) -> Foreign | None:
        """Return the flag of other programs; those train with rewards."""
        return None if self.root is SftConfig else foreign_flag(key)

    def _read_foreign(self, name: str, flag: Foreign, given: str | None) -> None:
        """Accept a flag of other programs that says what is done anyway; name any other with what to write."""
        values = [given] if given is not None else []
        while not values or flag.takes == "values":
            if flag.takes == "switch" or not self.words or self.words[0].startswith("--"):
                break
            values.append(self.words.pop(0))
        text = " ".join(values)
        if text not in flag.same:
            reason = "a flag of other programs, which has no key here"
            self.found.problems.append(Problem(f"--{name}", text or True, reason, flag.instead))

    def _assignment_follows(self) -> bool:
        """Return whether the next word is ``key=value`` of this document, and so no flag's value."""
        match = ASSIGNMENT.fullmatch(self.words[0]) if self.words else None
        return match is not None and self._is_known(match[2])

    def _is_known(self, key: str) -> bool:
        parts = key.split(".")
        return (
            key in self.aliases
            or key in self.modes
            or key in self.extra
            or field_at(self.root, parts) is not None
            or is_free(self.root, parts)
        )

    def _is_switch(self, key: str) -> bool:
        parts = self.aliases.get(key, key).split(".")
        known = field_at(self.root, parts)
        return key in self.modes or parts[-1] in SWITCHES or (known is not None and is_bool(known.annotation))

    def _take_switch(self, flag: str, given: str | None) -> bool:
        if given is None and self.words and self.words[0] in SWITCH_WORDS:
            given = self.words.pop(0)
        if given is not None and given not in SWITCH_WORDS:
            remedy = f"Write {flag} alone, or {flag}=false"
            self.found.problems.append(Problem(flag, given, "the flag is a switch", remedy))
        return given != "false"

    def _take_value(self, given: str | None) -> str | None:
        if given is not None:
            return given
        if not self.words or self.words[0].startswith("--") or self.words[0].endswith(YAML_SUFFIXES):
            return None
        return self.words.pop(0)

    def _unknown(self, name: str) -> Problem:
        known = [f"--{key.replace('_', '-')}" for key in (*self.aliases, *self.modes)]
        known += [f"--{path}" for path in paths_of(self.root)]
        hint = near(f"--{name}", known)
        if hint.startswith("known"):
            hint = "every key of the config is a flag: --dotted.key VALUE"
        return Problem(f"--{name}", None, "unknown flag", hint[0].upper() + hint[1:])

    def _marked(self, mark: str, path: str, text: str) -> Problem:
        reason = f"{mark!r} adds or removes a key in other programs; here every key is known and has a default"
        known = paths_of(self.root)
        hint = f"Write {path}={text}" if path in known else near(path, known)
        return Problem(f"{mark}{path}", text, reason, hint[0].upper() + hint[1:])
