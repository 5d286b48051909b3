"""What must not be seen: passwords and keys, in addresses, headers and under telling names, are shown as ``HIDDEN``.

What a run prints, logs or writes passes through here, so that a secret is in the memory of the processes that need it
and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***hidden***"
"""Stands where a secret was."""

_NAME = (
    r"(?:[\w-]*[_-])?(?:api[_-]?key|access[_-]?key|private[_-]?key|secret|password|passwd|passphrase|credentials)"
    r"|(?:(?:access|api|auth|bearer|hf|id|refresh|session)[_-]?)?token|authorization|cookie"
)
_KEY = re.compile(_NAME, re.IGNORECASE)
_OF_USERS = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^\s/?#'\"<>]*)@", re.IGNORECASE)
_QUERIED = rf"(?:{_NAME}|key|sig|signature|auth|pwd)"
_IN_QUERY = re.compile(rf"(?P<name>[?&;]{_QUERIED})=(?P<secret>[^\s&#;'\"<>]+)", re.IGNORECASE)
_IN_HEADER = re.compile(
    r"(?P<name>authorization['\"]?\s*[:=]\s*['\"]?(?:bearer\b|basic\b|token\b)?|\bbearer(?=\s+\S{8})|x-api-key['\"]?\s*[:=])"
    r"(?P<gap>\s*['\"]?)(?P<secret>[^\s'\",}\]]+)",
    re.IGNORECASE,
)


def hide(text: str) -> str:
    """``text`` with the secrets of addresses (user and password, keys in the query) and headers replaced."""
    text = _OF_USERS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _IN_QUERY.sub(rf"\g<name>={HIDDEN}", text)
    return _IN_HEADER.sub(rf"\g<name>\g<gap>{HIDDEN}", text)


def hide_in(value: Any, key: str = "") -> Any:
    """A copy of a document (mappings, lists, scalars) with its secrets replaced, those under telling names whole."""
    if isinstance(value, Mapping):
        return {name: hide_in(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_in(item, key) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if names_secret(key) else hide(value)


def hide_word(word: str) -> str:
    """A word of a command line, such as ``reward_manager.api_key=...``."""
    key, sign, _ = word.partition("=")
    name = key.rpartition(".")[2].lstrip("-").replace("-", "_")
    return f"{key}={HIDDEN}" if sign and names_secret(name) else hide(word)


def names_secret(key: str) -> bool:
    """Whether what stands under ``key`` is a secret by its name: ``api_key`` is, ``api_key_env`` names a variable."""
    return _KEY.fullmatch(key) is not None


def hidden_keys(value: Any, key: str = "") -> Iterator[str]:
    """The keys of a document under which a secret was replaced."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from hidden_keys(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from hidden_keys(item, f"{key}[{number}]")
    elif isinstance(value, str) and (HIDDEN in value):
        yield key
