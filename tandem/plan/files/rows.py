"""How many rows a run trains on: those of its files without what is held out, as far as that is quick to say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.base.errors import DataError
from tandem.base.regular import regular
from tandem.config.schema import Config, DataConfig
from tandem.data.files import LINES, open_tables
from tandem.data.rows import Row, RowError
from tandem.data.template import Template

COUNTED_BYTES = 1 << 26
"""Files up to this size are counted line by line for the arithmetic; parquet says its count at the end of the file."""

_READ_BYTES = 1 << 24
"""Files up to this size together are read whole, which is a fraction of a second."""


@dataclass(frozen=True)
class TrainedRows:
    """``kept`` rows of an epoch (None: only the data tell), of which ``held_out`` others are left out.

    ``at_most``: rows that are held out too could not be counted, so ``kept`` is an upper bound.
    """

    kept: int | None
    held_out: int = 0
    at_most: bool = False


def trained_rows(config: Config) -> TrainedRows:
    """Return the rows of the training files. What is too long or can't be read is known when a tokenizer reads it."""
    data = config.data
    if not data.train_files:
        return TrainedRows(None)
    rows = count_rows(data.train_files)
    if rows is None or not (data.val_files and data.drop_val_prompts):
        return TrainedRows(rows)
    if sum(_size(name) for name in (*data.train_files, *data.val_files)) > _READ_BYTES:
        return TrainedRows(rows, at_most=True)
    try:
        held = {prompt for prompt in _prompts(data, data.val_files) if prompt is not None}
        among = sum(prompt in held for prompt in _prompts(data, data.train_files))
    except (DataError, OSError, ValueError):  # another check says what is wrong with them
        return TrainedRows(rows, at_most=True)
    return TrainedRows(rows - among, among)


def count_rows(files: Sequence[str]) -> int | None:
    """Count the rows of all files, where counting them is cheap."""
    total = 0
    for name in files:
        path = Path(name).expanduser()
        try:
            if path.suffix.lower() in (".parquet", ".pq"):
                import pyarrow.parquet as parquet  # type: ignore[import-untyped]

                total += int(parquet.read_metadata(regular(path)).num_rows)
            elif path.suffix.lower() in LINES and path.stat().st_size <= COUNTED_BYTES:
                with regular(path).open("rb") as handle:
                    total += sum(1 for line in handle if line.strip())
            else:
                return None
        except (OSError, ValueError):
            return None
    return total


def _size(name: str) -> int:
    try:
        return Path(name).expanduser().stat().st_size
    except OSError:
        return 0


def _prompts(data: DataConfig, files: list[str]) -> Iterator[str | None]:
    """Yield what each row's prompt is made of: equal ones give equal prompts. None for a row that has none to
    compare.
    """
    template = None if data.template is None else Template(data.template)
    for table in open_tables(files, keep_nulls=data.keep_nulls):
        for row in table.scan():
            yield None if isinstance(row, RowError) else _prompt(data, template, row)


def _prompt(data: DataConfig, template: Template | None, row: Row) -> str | None:
    try:
        value = row.nested(data.prompt_key) if template is None else template.fill(row)
        beside = [None if key is None else row.find(key) for key in (data.tools_key, data.image_key)]
    except RowError:
        return None
    return json.dumps([value, *beside], sort_keys=True, default=repr)
