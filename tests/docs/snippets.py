"""Fenced blocks of a Markdown page, and how each is tried.

The words behind the language say what a block is:

- ``yaml``: a whole config, planned without a problem (``later``: it names what can't run yet), and run with ``run``.
  ``part``: laid over the folder's ``run.yaml`` first.
- ``python``: executed. ``file=NAME`` (any language): written to that file instead, for the blocks that follow.
- ``bash``: every command is tried; ``train``, ``sft`` and ``eval`` are planned, and run only with ``run``. ``refused``:
  the command must be refused with the very lines of the ``text`` block that follows.
- ``text``: output, which is not tried by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("yaml", "python", "bash", "text")
WORDS = ("later", "part", "run", "refused")
_FENCE = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One block: ``line`` is where its text begins."""

    page: str
    line: int
    language: str
    words: frozenset[str]
    file: str | None
    text: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


def read_snippets(page: Path, name: str) -> list[Snippet]:
    """All blocks of ``page`` in order. Raises ``ValueError`` for a block that nobody would try."""
    source = page.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(source):
        language, info, text = match.groups()
        line = source.count("\n", 0, match.start()) + 2
        words = info.split()
        files = [word.removeprefix("file=") for word in words if word.startswith("file=")]
        known = frozenset(word for word in words if not word.startswith("file="))
        if language not in LANGUAGES or known - set(WORDS):
            raise ValueError(f"{name}:{line}: block of {language!r} with {sorted(known)}: none of {LANGUAGES}, {WORDS}")
        found.append(Snippet(name, line, language, known, files[0] if files else None, text))
    return found


def commands(text: str) -> list[str]:
    """The commands of a shell block: comments dropped, lines that end with a backslash joined."""
    joined = text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]
