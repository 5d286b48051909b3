"""``tandem init NAME`` of an example: its files, copied out of the installed package."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

import tandem
from tandem.base.errors import TandemError

FOLDER = "examples"
"""Where copies go, so that commands and paths in them are those of the documentation."""

_NAMED = re.compile(rf"\b{FOLDER}/(\w+)/")
_READ = (".md", ".yaml", ".py")


def example_names() -> list[str]:
    """Return the names of the examples that came with the package."""
    return sorted(folder.name for folder in _source().iterdir() if folder.is_dir() and _files(folder))


def copy_example(name: str, into: Path) -> list[Path]:
    """Copy the example ``name``, and those whose files it names, below ``into``; return what is there afterwards.

    A file that is there already and is the same stays. Raises ``TandemError``, before anything is written, for a name
    that no example has and for a file that is there and differs.
    """
    pairs = [(file, into / FOLDER / file.relative_to(_source())) for part in _with_named(name) for file in _files(part)]
    for file, copy in pairs:
        if copy.exists() and not (copy.is_file() and copy.read_bytes() == file.read_bytes()):
            raise TandemError(f"{copy} exists and differs from the example's: move it away, or choose another --out")
    for file, copy in pairs:
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return [copy for _, copy in pairs]


def first_command(name: str) -> str:
    """Return the first command that a README of the example gives, "" where none does."""
    lines = (line for file in _files(_source() / name) if file.name == "README.md" for line in _lines(file))
    commands = (line.partition("#")[0].strip() for line in lines if re.match(r"\s*(tandem|python|pip|bash) ", line))
    return next(commands, "")


def unknown(name: str, others: Iterable[str]) -> TandemError:
    """Return the error for a ``name`` that is neither one of the ``others`` nor an example."""
    known = [*others, *example_names()]
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return TandemError(f"nothing to begin with is called {name!r}. {meant}There are: {', '.join(known)}")


def _source() -> Path:
    """Return the folder of all examples: inside an installed package, beside one that is used from its repository."""
    package = Path(tandem.__file__).parent
    inside = package / FOLDER
    return inside if inside.is_dir() else package.parent / FOLDER


def _with_named(name: str) -> list[Path]:
    """Return the folder of ``name`` and of each example that one of them names, in the order in which they are met."""
    met = [_source() / name]
    for folder in met:
        texts = [file.read_text("utf-8") for file in _files(folder) if file.suffix in _READ]
        named = dict.fromkeys(found for text in texts for found in _NAMED.findall(text))
        met += [_source() / other for other in named if _source() / other not in met and (_source() / other).is_dir()]
    return met


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8").splitlines()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
