"""Checksums of all files of a folder in a file beside them: what is read later is what was written.

``manifest.json`` lists each file with its length and SHA-256 (as ``sha256sum`` prints it), and a checksum of the list
itself. It guards against damage, not against somebody who writes a new manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from tandem.base.errors import DataError
from tandem.base.folders import flush
from tandem.base.regular import regular

MANIFEST = "manifest.json"
_FORMAT = "tandem-manifest/1"
_READERS = 4
_SMALL = 1 << 20
"""Bytes of a file that is read in any case."""
_CAUTION = "After a change of your own that you want to keep, remove {manifest}"


@dataclass(frozen=True)
class Digest:
    """The length of a file in bytes and its SHA-256 in hex."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Digest:
        """Return the digest of the file as it is now. Raises ``OSError``."""
        with regular(path).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(file.tell(), sha256)


Digests: TypeAlias = dict[str, Digest]
"""By path inside the folder, with ``/`` between names."""


class DamagedError(DataError):
    """A file is not as it was written. ``path`` is the file, ``what`` is wrong with it."""

    def __init__(self, path: Path, what: str, remedy: str = "") -> None:
        super().__init__(f"{path}: {what}{'. ' + remedy if remedy else ''}")
        self.path, self.what = path, what


def write_manifest(folder: Path, known: Mapping[str, Digest] | None = None) -> None:
    """List every file under ``folder``; what a manifest further down lists, and the ``known``, is not read again."""
    digests = dict(known or {})
    for parent, folders, names in os.walk(folder):
        folders.sort()
        here = Path(parent)
        inside = PurePosixPath(here.relative_to(folder).as_posix())
        if MANIFEST in names and here != folder:
            digests |= {str(inside / name): digest for name, digest in read_manifest(here).items()}
        for name in names:
            key = str(inside / name)
            if key not in digests and key != MANIFEST:
                digests[key] = Digest.of(here / name)
    files = {name: vars(digest) for name, digest in sorted(digests.items())}
    document = {"format": _FORMAT, "list": _list_sum(files), "files": files}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1), "utf-8")
    flush(folder / MANIFEST)


def read_manifest(folder: Path) -> Digests:
    """Return what ``folder`` should hold. Raises ``DamagedError`` where the manifest is missing or not as it was
    written.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(regular(path).read_bytes())
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise DamagedError(path, f"is damaged, or not of the format {_FORMAT}")
        if document["list"] != _list_sum(document["files"]):
            raise DamagedError(path, "is damaged: its list has another checksum than it was written with")
        return {name: Digest(entry["bytes"], entry["sha256"]) for name, entry in document["files"].items()}
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except OSError as error:
        raise DamagedError(path, f"can't be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(path, "is damaged: not a whole list of files") from error


def verify(folder: Path, *, own_changes: bool = False, quick: bool = False) -> None:
    """Read every file that the manifest of ``folder`` lists; ``quick``: of large ones only how long they are.

    Raises ``DamagedError`` for the first that is missing, cut, changed or can't be read. ``own_changes``: say what to
    do where the user meant the change. Further files are left aside.
    """
    digests = read_manifest(folder)
    remedy = _CAUTION.format(manifest=folder / MANIFEST) if own_changes else ""
    with ThreadPoolExecutor(_READERS) as readers:  # hashing lets other threads run
        faults = readers.map(lambda name: _fault(folder / name, digests[name], quick), digests)
        for name, what in zip(digests, faults, strict=True):
            if what:
                raise DamagedError(folder / name, what, remedy)


def _fault(path: Path, written: Digest, quick: bool) -> str:
    """Return what is wrong with a file; nothing: an empty string."""
    try:
        size = path.stat().st_size
        if size != written.bytes:
            return f"is damaged: it has {size} bytes, {written.bytes} were written"
        if not (quick and size > _SMALL) and Digest.of(path) != written:
            return "is damaged: its content is not what was written (another SHA-256 than in the manifest)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read ({error.strerror or error})"
    return ""


def _list_sum(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
