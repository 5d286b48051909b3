"""The samples of a run as the page asks for them: filtered, searched, sorted and cut into pages here, never there.

What is filtered and sorted by is held in memory, a dozen numbers a sample; texts stay in the parts and are read for
the rows of a page, or part by part for a search.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from tandem.observe.samples.parts import Kind
from tandem.view.files import File, UnreadableError, files_in, of_kind, read

NUMBERS = ("step", "reward", "advantage", "length", "prompt_length", "lag", "version", "trained_tokens")
WORDS = ("uid", "data_source", "finish", "failure")
PART = "part: "
"""Before the name of a number that the scorer gave beside the reward, where samples are sorted or filtered by it."""
_PLACE = ("group", "sample")
_SEARCHED = ("prompt", "response", "failure", "ground_truth")
_SEARCHES_KEPT = 8
_MOST_PARTS = 32  # of a scorer that names its numbers after samples, the first ones
SHORT = 600
"""Characters of a text in a list; all of it is asked for one sample at a time."""

_ANY = "*"


@dataclass(frozen=True)
class Query:
    """Which samples, in which order: bounds of numbers, and words that others are equal to (``*``: to any at all)."""

    kind: Kind = "train"
    text: str = ""
    at_least: tuple[tuple[str, float], ...] = ()
    at_most: tuple[tuple[str, float], ...] = ()
    equal: tuple[tuple[str, str], ...] = ()
    sort: str = "step"
    descending: bool = True
    offset: int = 0
    limit: int = 50


@dataclass(frozen=True)
class _Search:
    """The rows of each file in which a text stands; files are added as they are read."""

    found: dict[File, pa.Array]


def is_number(name: str) -> bool:
    """Return whether samples can be sorted by ``name``, and bounded."""
    return name in NUMBERS or name.startswith(PART)


class SampleIndex:
    """The samples of the run in ``folder``, as of the last look. Safe in threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._tables: dict[File, pa.Table] = {}
        self._unreadable: dict[File, str] = {}  # replaced, not changed: others read it meanwhile
        self._trouble: str | None = None  # why the folder can't be read
        self._joined: dict[str, tuple[list[File], list[File], pa.Table]] = {}
        self._searches: OrderedDict[str, _Search] = OrderedDict()

    def steps(self) -> dict[str, list[int]]:
        """Return the steps that have samples, by kind."""
        found: dict[str, list[int]] = {}
        for file in self._files():
            found.setdefault(file.part.kind, []).append(file.part.step)
        return found

    def left_out(self) -> list[str]:
        """Return which files can't be read, as far as they were looked at, and why."""
        files = [words for _, words in sorted(self._unreadable.items())]
        return files if self._trouble is None else [self._trouble, *files]

    def counts(self, kind: Kind) -> dict[File, int]:
        """Return how many samples each file of a kind has, in the order of steps."""
        with self._lock:
            files, _ = self._look(kind)
            return {file: len(self._tables[file]) for file in files}

    def read(self, file: File, names: Sequence[str] | None = None) -> pa.Table | None:
        """Return the columns ``names`` of a file, or all; None where it can't be read, which is noted."""
        try:
            return read(file, names)
        except UnreadableError as error:
            if file.part.path.exists():  # else it was thinned out
                with self._lock:
                    self._unreadable = {**self._unreadable, file: str(error)}
            return None

    def page(self, query: Query) -> dict[str, Any]:
        """Return the rows of one page, texts cut to ``SHORT`` characters, and how many there are in all."""
        with self._lock:
            files, table = self._look(query.kind)
            chosen = _filtered(table, query)
            if query.text:
                chosen = chosen.take(self._containing(files, chosen, query.text))
            order = pc.sort_indices(chosen, sort_keys=_order(query, chosen.column_names))
            places = chosen.take(order.slice(query.offset, query.limit)).select(["_part", "_row"]).to_pylist()
            rows = self._rows(files, [(place["_part"], place["_row"]) for place in places])
        return {"total": len(chosen), "of": len(table), "rows": [_shortened(row) for row in rows]}

    def group(self, kind: Kind, step: int, group: int) -> list[dict[str, Any]]:
        """Return all samples of one prompt of a step, whole, in their order; none where they are not kept."""
        file = next((file for file in of_kind(self._files(), kind) if file.part.step == step), None)
        if file is None:
            return []
        table = self.read(file)
        if table is None:
            return []
        rows = table.filter(pc.equal(table["group"], group)).to_pylist()
        return [_plain(row) for row in sorted(rows, key=lambda row: row["sample"])]

    def prompts(self, kind: Kind, limit: int = 200) -> list[dict[str, Any]]:
        """Return prompts by how their mean reward changed from the first step that has them to the last."""
        with self._lock:
            _, table = self._look(kind)
        means = table.group_by(["uid", "step"]).aggregate([("reward", "mean"), ("reward", "count")]).sort_by("step")
        means = means.filter(pc.greater(means["reward_count"], 0))
        whole = means.group_by("uid", use_threads=False).aggregate(
            [("reward_mean", "first"), ("reward_mean", "last"), ("step", "first"), ("step", "last"), ("step", "count")]
        )
        whole = whole.append_column("change", pc.subtract(whole["reward_mean_last"], whole["reward_mean_first"]))
        names = {"reward_mean_first": "first", "reward_mean_last": "last", "step_count": "steps"}
        worst = whole.filter(pc.greater(whole["step_count"], 1)).sort_by("change").slice(0, limit)
        return [{names.get(key, key): value for key, value in row.items()} for row in worst.to_pylist()]

    def over_time(self, kind: Kind, uid: str) -> list[dict[str, Any]]:
        """Return mean reward and length of one prompt's answers, step by step."""
        with self._lock:
            _, table = self._look(kind)
        own = table.filter(pc.equal(table["uid"], uid))
        means = own.group_by("step").aggregate([("reward", "mean"), ("length", "mean"), ("reward", "count")])
        found: list[dict[str, Any]] = means.sort_by("step").to_pylist()
        return found

    def failures(self, kind: Kind) -> list[dict[str, Any]]:
        """Return what scorers failed with, and how often."""
        with self._lock:
            _, table = self._look(kind)
        said = table.filter(pc.is_valid(table["failure"])).group_by("failure").aggregate([("step", "count")])
        return [
            {"failure": row["failure"], "count": row["step_count"]}
            for row in said.sort_by([("step_count", "descending")]).slice(0, 100).to_pylist()
        ]

    def names(self, kind: Kind) -> dict[str, list[str]]:
        """Return the data sources, the finish reasons and the parts of rewards that there are, for a choice."""
        with self._lock:
            _, table = self._look(kind)
        words = {name: sorted(filter(None, table[name].unique().to_pylist())) for name in ("data_source", "finish")}
        return {**words, "parts": sorted(name for name in table.column_names if name.startswith(PART))}

    # --- what is held ------------------------------------------------------------------------------------------------

    def _files(self) -> list[File]:
        try:
            found, self._trouble = files_in(self._folder), None
        except UnreadableError as error:
            found, self._trouble = [], str(error)
        return found

    def _look(self, kind: Kind) -> tuple[list[File], pa.Table]:
        """Return the files of a kind that can be read, and what their samples are sorted by, with file and row."""
        there = of_kind(self._files(), kind)
        known, files, table = self._joined.get(kind, ([], [], None))
        if table is None or known != there:
            self._forget(kind, set(there))
            files = [file for file in there if file in self._tables or self._take_in(file)]
            tables = [_placed(self._tables[file], number) for number, file in enumerate(files)]
            table = pa.concat_tables(tables, promote_options="default") if tables else _placed(_EMPTY, 0)
            self._joined[kind] = there, files, table
        return files, table

    def _forget(self, kind: Kind, there: set[File]) -> None:
        """Let go of what is held of files of a kind that aren't ``there`` any more, or are others now."""
        held: list[dict[File, Any]] = [self._tables, *(search.found for search in self._searches.values())]
        for files in held:
            for gone in [file for file in files if file.part.kind == kind and file not in there]:
                del files[gone]
        kept = {file: words for file, words in self._unreadable.items() if file.part.kind != kind or file in there}
        self._unreadable = kept

    def _take_in(self, file: File) -> bool:
        """Take in a file; return whether it could be read."""
        table = self.read(file, [*_PLACE, *NUMBERS, *WORDS, "scores"])
        if table is not None:
            self._tables[file] = _parted(table)
        return table is not None

    def _containing(self, files: Sequence[File], chosen: pa.Table, text: str) -> pa.Array:
        """Return the places in ``chosen`` of the samples in whose texts ``text`` stands, whatever its case."""
        search = self._searches.setdefault(text, _Search({}))
        self._searches.move_to_end(text)
        while len(self._searches) > _SEARCHES_KEPT:
            self._searches.popitem(last=False)
        rows, owner = chosen["_row"].to_numpy(), chosen["_part"].to_numpy()
        keep = np.zeros(len(chosen), dtype=bool)
        for number in np.unique(owner):
            file = files[number]
            if file not in search.found:
                search.found[file] = np.union1d(_rows_with(self.read(file, _SEARCHED), text), _rows_noting(file, text))
            own = slice(*np.searchsorted(owner, [number, number + 1]))  # the rows of a part stand together, in order
            keep[own] = np.isin(rows[own], search.found[file])
        return pa.array(np.flatnonzero(keep))

    def _rows(self, files: Sequence[File], places: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return whole samples, in the order of their places (number of file, row in it), but for those of files that
        can't be read.
        """
        wanted = list(places)
        by_part: dict[int, list[int]] = {}
        for number, row in wanted:
            by_part.setdefault(number, []).append(row)
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for number, rows in by_part.items():
            table = self.read(files[number], _LISTED)
            if table is None:
                continue
            there = [row for row in rows if row < len(table)]
            for row, values in zip(there, table.take(there).to_pylist(), strict=True):
                found[number, row] = _plain(values)
        return [found[place] for place in wanted if place in found]


_LISTED = (*_PLACE, *NUMBERS, *WORDS, "kind", "prompt", "response", "ground_truth", "counted", "scores")
_EMPTY = pa.table(
    {
        **{name: pa.array([], pa.int32()) for name in (*_PLACE, *NUMBERS)},
        **{name: pa.array([], pa.string()) for name in WORDS},
    }
)


def _placed(table: pa.Table, number: int) -> pa.Table:
    """Return ``table`` with the number of its part and the place of each row in it."""
    count = len(table)
    part, row = pa.array(np.full(count, number, np.int32)), pa.array(np.arange(count, dtype=np.int32))
    return table.append_column("_part", part).append_column("_row", row)


def _parted(table: pa.Table) -> pa.Table:
    """Return ``table`` with a column for each number in ``scores``, null where a sample has none of that name."""
    scores = table["scores"].combine_chunks()
    if isinstance(scores, pa.ChunkedArray):  # of a table without rows
        scores = (
            pa.concat_arrays(scores.chunks) if scores.num_chunks else pa.array([], table.schema.field("scores").type)
        )
    offsets = scores.offsets.to_numpy()
    owner = np.repeat(np.arange(len(table)), np.diff(offsets))
    first, last = (int(offsets[0]), int(offsets[-1])) if len(table) else (0, 0)
    names = scores.keys.slice(first, last - first).dictionary_encode()
    values = scores.items.slice(first, last - first).to_numpy(zero_copy_only=False)
    table, which = table.drop_columns(["scores"]), names.indices.to_numpy()
    for number, name in enumerate(names.dictionary.to_pylist()[:_MOST_PARTS]):
        column = np.full(len(table), np.nan)
        column[owner[which == number]] = values[which == number]
        table = table.append_column(f"{PART}{name}", pa.array(column, from_pandas=True))
    return table


def _filtered(table: pa.Table, query: Query) -> pa.Table:
    if any(name not in table.column_names for name, _ in (*query.at_least, *query.at_most)):
        return table.slice(0, 0)  # a part of the reward that no sample has
    mask: Any = None
    tests = [pc.greater_equal(table[name], bound) for name, bound in query.at_least]
    tests += [pc.less_equal(table[name], bound) for name, bound in query.at_most]
    tests += [pc.is_valid(table[name]) if word == _ANY else pc.equal(table[name], word) for name, word in query.equal]
    for test in tests:
        mask = test if mask is None else pc.and_kleene(mask, test)
    return table if mask is None else table.filter(mask)


def _order(query: Query, names: Sequence[str]) -> list[tuple[str, str]]:
    direction = "descending" if query.descending else "ascending"
    rest = [(name, "ascending") for name in ("step", "group", "sample") if name != query.sort]
    if query.sort != "step":
        rest[0] = ("step", "descending")
    return [(query.sort, direction), *rest] if query.sort in names else rest


def _rows_with(table: pa.Table | None, text: str) -> Any:
    """Return the numbers of the rows of a table in which ``text`` stands, (N,) int64."""
    if table is None:
        return np.zeros(0, dtype=np.int64)
    hits = np.zeros(len(table), dtype=bool)
    for name in _SEARCHED:
        found = pc.match_substring(table[name], text, ignore_case=True)
        hits |= np.asarray(found.fill_null(False))
    return np.flatnonzero(hits)


def _rows_noting(file: File, text: str) -> Any:
    """Return the numbers of the rows of a file in whose notes, such as a judge's reply, ``text`` stands, (N,) int64."""
    with suppress(UnreadableError):  # which is said where the notes are asked for
        small = text.lower()
        said = (
            i
            for i, notes in enumerate(read(file, ["notes"])["notes"].to_pylist())
            if any(small in words.lower() for _, words in notes or () if words)
        )
        return np.fromiter(said, dtype=np.int64)
    return np.zeros(0, dtype=np.int64)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as JSON has it: maps as objects."""
    return {name: dict(value) if name in ("scores", "notes") else value for name, value in row.items()}


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    cut = {name: row[name] for name in ("prompt", "response", "ground_truth") if len(row[name]) > SHORT}
    return row | {name: text[:SHORT] for name, text in cut.items()} | {"cut": sorted(cut)}
