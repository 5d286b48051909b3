"""What must not be seen: passwords and keys, in addresses, headers and under telling names, are shown as ``HIDDEN``.

What a run prints, logs or writes passes through here, so that a secret is in the memory of the processes that need it
and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import yaml

HIDDEN = "***hidden***"
"""Stands where a secret was."""

_FILES = (".yaml", ".yml")
"""Endings of words that are no flag's value."""

_NAME = (
    r"(?:[\w-]*[_-])?(?:api[_-]?key|access[_-]?key|private[_-]?key|secret|password|passwd|passphrase|credentials)"
    r"|(?:(?:access|api|auth|bearer|hf|id|refresh|session)[_-]?)?token|authorization|cookie"
)
_KEY = re.compile(_NAME, re.IGNORECASE)
_OF_USERS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,30}://)"
    r"(?:[^\s/?#'\"<>:@\[]{1,255}:(?!\d*[/?#])[^\s'\"<>]{0,999}|[^\s/?#'\"<>]{0,999})@",
    re.IGNORECASE,
)
"""Repetitions are bounded: a text of any length and without a gap is read once, not once from each of its letters."""
_OF_USERS_WITHOUT_SCHEME = re.compile(
    r"(?P<before>(?<![^\s'\"=(\[{,])(?!mailto:))[^\s/?#'\"<>:@=(\[{,]+:(?!//)[^\s'\"<>@]+@(?=[\w\[])", re.IGNORECASE
)
_IN_QUERY = re.compile(r"(?P<name>[?&;#][^\s=&;#?'\"<>]+)=(?P<secret>[^\s&#;'\"<>]+)")
_IN_HEADER = re.compile(
    r"(?P<name>authorization['\"]?\s*[:=]\s*['\"]?(?:bearer\b|basic\b|token\b)?|\bbearer(?=\s+\S{8})|x-api-key['\"]?\s*[:=])"
    r"(?P<gap>\s*['\"]?)(?P<secret>[^\s'\",}\]]+)",
    re.IGNORECASE,
)
_LOOKS_LIKE_KEY = re.compile(
    r"(?<![\w-])(?:"
    r"[spr]k-(?:(?=[\w-]*[\dA-Z])[\w-]{6,}|[\w-]{16,})"
    r"|hf_(?:(?=[a-zA-Z]*\d)(?=[a-z\d]*[A-Z])[a-zA-Z\d]{8,}|[a-zA-Z\d]{20,})"
    r"|(?:gh[oprsu]|github_pat)_\w{8,}|glpat-[\w-]{8,}|xox[abeprs]-[\w-]{8,}|nvapi-[\w-]{8,}"
    r"|A(?:KI|SI)A[A-Z\d]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"
    r")"
)
"""Keys as services write them: known by how they begin."""

_WORDS_IN_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CREDENTIAL = frozenset({"secret", "password", "passwd", "passphrase", "pwd", "signature", "credential", "credentials"})
_CREDENTIAL_AT_THE_END = frozenset({"token", "tok", "key", "sig", "auth", "authorization", "pass", "cookie", "jwt"})
_LONG = ("token", "secret", "password", "signature", "credential", "apikey", "accesskey", "secretkey", "privatekey")
_PATH = re.compile(r"[-+~]*[A-Za-z_][\w.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_WITHOUT_GAPS = 24
_READ_FROM = re.compile(r"(?:[\w-]*_)?(?:path|file|files|folder|dir)|resume|python")
"""Keys of places on a disk."""


def hide(text: str) -> str:
    """Return ``text`` with its secrets replaced: user and password of an address (also of one without a scheme), what
    stands under a telling name in a query, headers, and what looks like a key itself (``sk-...``, ``hf_...``).
    """
    text = _OF_USERS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _OF_USERS_WITHOUT_SCHEME.sub(rf"\g<before>{HIDDEN}@", text)
    text = _IN_QUERY.sub(
        lambda found: f"{found['name']}={HIDDEN}" if _names_credential(found["name"]) else found[0], text
    )
    text = _IN_HEADER.sub(rf"\g<name>\g<gap>{HIDDEN}", text)
    return _LOOKS_LIKE_KEY.sub(HIDDEN, text)


def _names_credential(name: str) -> bool:
    """Return whether what a query or a variable calls ``name`` is a credential: ``X-Amz-Signature``,
    ``private_token``.
    """
    words = [word.lower() for word in _WORDS_IN_NAME.findall(unquote(name)) if not word.isdigit()]
    if not words:
        return False
    return not _CREDENTIAL.isdisjoint(words) or words[-1] in _CREDENTIAL_AT_THE_END or words[-1].endswith(_LONG)


def hide_in(value: Any, key: str = "") -> Any:
    """Return a copy of a document (mappings, lists, scalars) with its secrets replaced, those under telling names
    whole. Paths stay: what a run wrote of its config must read what the run read.
    """
    if isinstance(value, Mapping):
        under = {"by_source": "path"}  # whose keys are names of data
        return {name: hide_in(item, under.get(key, str(name))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_in(item, key) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and names_secret(key):
        return HIDDEN
    if not isinstance(value, str) or not value:
        return value
    if _READ_FROM.fullmatch(key) and "://" not in value:
        return value  # a folder may look like a key, and a run that goes on by what is written here would read another
    return HIDDEN if hides(key, value) else hide(value)


def hide_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line; flag and value may be one word or two (``--reward_manager.api_key ...``)."""
    shown: list[str] = []
    flag = ""
    for word in words:
        is_flag = word.startswith("--")
        key, sign, value = word.partition("=")
        if flag and not is_flag and not word.endswith(_FILES) and hides(_last(flag), word):
            shown.append(HIDDEN)
        elif sign and _PATH.fullmatch(key):
            shown.append(f"{key}={_hide_value(_last(key), value)}")
        else:
            shown.append(word if is_flag else _hide_value("", word))
        flag = word if is_flag and not sign else ""
    return shown


def _last(key: str) -> str:
    """Return the last part of a key or flag, as the config spells it."""
    return key.rpartition(".")[2].lstrip("-").replace("-", "_")


def _hide_value(name: str, text: str) -> str:
    """Return the value of a flag or an assignment as YAML has it: a document in it loses its secrets too."""
    if text and hides(name, text):
        return HIDDEN
    if any(mark in text for mark in "{[:"):
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError:
            return hide(text)
        if isinstance(document, dict | list) and (shown := hide_in(document, name)) != document:
            return yaml.safe_dump(shown, default_flow_style=True, width=float("inf"), sort_keys=False).strip()
    return hide(text)


def hides(key: str, value: str) -> bool:
    """Return whether ``value`` is replaced whole under ``key``: a secret, or a key where a variable's name belongs."""
    return names_secret(key) or (is_env_of_secret(key) and not is_variable(value))


def is_env_of_secret(key: str) -> bool:
    """Return whether ``key`` names the environment variable of a secret, as ``api_key_env`` does."""
    return key.lower().endswith("_env") and _names_credential(key[: -len("_env")])


def is_variable(value: str) -> bool:
    """Return whether ``value`` can be meant as the name of an environment variable, and is no key pasted in its
    place.
    """
    if _VARIABLE.fullmatch(value) is None or _LOOKS_LIKE_KEY.search(value):
        return False
    return "_" in value or len(value) < _MOST_WITHOUT_GAPS or not any(letter.isdigit() for letter in value)


def names_secret(key: str) -> bool:
    """Return whether what stands under ``key`` is a secret by its name: ``api_key`` is, ``api_key_env`` names a
    variable.
    """
    return _KEY.fullmatch(key.lstrip("-")) is not None


def hidden_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of a document under which a secret was replaced."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from hidden_keys(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from hidden_keys(item, f"{key}[{number}]")
    elif isinstance(value, str) and (HIDDEN in value):
        yield key
