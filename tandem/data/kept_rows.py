"""Rows that a program has in its memory, kept in the folder of its run as a file that a config can name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tandem.data.base_source import as_rows
from tandem.data.rows import RowError

_PLACE = Path(".tandem") / "data"


def keep_rows(dataset: object, folder: Path, split: str) -> Path:
    """Write the rows of ``dataset`` below ``folder`` and return the file, which is named by what is in it.

    So the same rows are the same file, and a run that goes on finds its own. What writes parquet itself (a
    ``datasets.Dataset``, a data frame) does so; other rows become JSON. Raises ``DataError`` for what is no rows, and
    with the number of a row that JSON can't hold.
    """
    place = folder / _PLACE
    place.mkdir(parents=True, exist_ok=True)
    beside = place / f".{split}.partial"
    if not hasattr(dataset, "to_parquet"):
        return _named(beside, split, "jsonl", _lines(dataset, split))
    dataset.to_parquet(str(beside))
    return _named(beside, split, "parquet", None)


def _named(beside: Path, split: str, ending: str, text: str | None) -> Path:
    """Give the file its name, whole; ``text`` is what it gets to hold, None what it holds already."""
    if text is not None:
        beside.write_text(text, "utf-8")
    digest = hashlib.sha256(beside.read_bytes()).hexdigest()[:16]
    path = beside.with_name(f"{split}-{digest}.{ending}")
    os.replace(beside, path)
    return path.resolve()


def _lines(dataset: object, split: str) -> str:
    lines = []
    for row in as_rows(dataset, name=f"the {split} dataset", split=split).scan():
        if isinstance(row, RowError):
            raise row
        try:
            lines.append(json.dumps(dict(row.values), ensure_ascii=False, allow_nan=False, default=_plain))
        except (TypeError, ValueError) as error:
            raise row.bad("not JSON", f"it can't be kept as JSON: {error}") from None
    return "".join(f"{line}\n" for line in lines)


def _plain(value: Any) -> Any:
    """Return numbers and lists of numpy and torch as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
