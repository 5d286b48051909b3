"""Contradictions between the config and the data files, of which the first rows are read."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal

from tandem.base.errors import DataError, Problem
from tandem.base.registry import Signature
from tandem.config.schema import Config, DataConfig, SftConfig, SourceConfig
from tandem.data.base_source import BaseDataSource
from tandem.data.chat import checked_messages
from tandem.data.examples import ExampleColumns
from tandem.data.files import open_tables
from tandem.data.modalities import beyond_text
from tandem.data.rows import Row, RowError
from tandem.data.tasks import TaskTable
from tandem.data.template import REMEDY, Template, TemplateError
from tandem.plan.checks.parameters import check_parameters
from tandem.plan.checks.samples.environment import check_built_in_source
from tandem.plan.checks.samples.first_prompt import check_first_prompt
from tandem.plan.files.mix import example_columns, mix_names
from tandem.reward.static import describe_class

Columns = Sequence[tuple[str, str]]
"""(config key, column that it names)."""

Form = Literal["text", "messages", "answer", "label"]
_FORMS: dict[Form, str] = {
    "text": "of texts",
    "messages": "of conversations, each a list of messages with role and content",
    "answer": "of answers, each a text or a list of messages",
    "label": "of labels, true or false",
}

SAMPLED_ROWS = 100

_ALSO = {"data.answer_key": ", or null for none", "data.template": ", or {{{{{}}}}} where the braces are text"}


@dataclass(frozen=True)
class Read:
    """What is read of rows beside text: ``images`` in messages, and those in the column ``image_key``."""

    images: bool = False
    image_key: str | None = None

    def beyond(self, row: Row) -> Iterator[tuple[str, str]]:
        """Yield what the row holds that isn't read; see ``beyond_text``."""
        return beyond_text(row.values, images=self.images, image_key=self.image_key if self.images else None)

    @property
    def words(self) -> str:
        """What models are trained on."""
        return "models are trained on text and images alone" if self.images else "models are trained on text alone"

    def remedy(self, column: str, held: str) -> str:
        """Return what to do about a ``column`` that holds more."""
        if self.images and column in ("image", "images") and self.image_key is None:
            return f"Write data.image_key: {column}"
        return "Leave such rows out" if "messages" in held else f"Take rows of text, without a column {column}"


TEXT_ALONE = Read()


def check_data(config: Config, images: bool = False) -> Iterator[Problem]:
    """Yield every problem of the training and held-out prompts; ``images`` are read of them too."""
    data = config.data
    seen = Read(images, data.image_key)
    yield from check_given(data)
    keys = _column_keys(data)
    yield from check_files("data.train_files", data.train_files, keys, data.on_bad_row, seen)
    yield from check_files("data.val_files", data.val_files, keys, data.on_bad_row, seen)
    yield from check_overlap(data.train_files, data.val_files)
    if data.reasoning_gym is None:
        yield from check_first_prompt(config, images)
    if data.reasoning_gym is not None:
        yield from _check_task(data.reasoning_gym)
        if data.val_files:
            reason = "the held-out prompts of a procedural task are further questions of it"
            yield Problem("data.val_files", data.val_files, reason, "Leave it out")


def check_forms(
    files: Sequence[str], on_bad_row: str, forms: Mapping[str, tuple[str, Form]], seen: Read = TEXT_ALONE
) -> Iterator[Problem]:
    """Check that the first row holds in each column what it is read as (config key -> column and form).

    ``check_files`` says what is wrong with file or column. Where bad rows are left out, the run counts them.
    """
    if on_bad_row != "error":
        return
    with suppress(DataError, OSError):
        row = next((row for table in open_tables(files[:1]) for row in islice(table.scan(), 1)), None)
        if not isinstance(row, Row) or any(seen.beyond(row)):
            return
        for key, (column, form) in forms.items():
            with suppress(RowError):
                wrong = _not_in_form(row, column, form, seen.images)
                if wrong is not None:
                    reason = f"{row.table}, row {row.number}: {wrong}"
                    yield Problem(key, column, reason, f"Write the column {_FORMS[form]}")


def _not_in_form(row: Row, column: str, form: Form, images: bool) -> str | None:
    """Return what the column of ``row`` holds instead of ``form``; None where that is it."""
    value = row.find(column)
    if form == "label":
        return None if value in (True, False) else f"{value!r} is neither true nor false"
    if isinstance(value, str) and form != "messages":
        return None
    if form == "text":
        return f"{value!r} is not text"
    try:
        messages = checked_messages(None if value is None else row.nested(column), images=images)
    except DataError as error:
        return str(error)
    if form == "messages" and all(message["role"] != "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        return f"no message is the assistant's (the roles are {roles}), so there is nothing to learn"
    return None


def notes_on_files(data: DataConfig) -> Iterator[str]:
    """Note files that are named more than once."""
    for name, count in Counter(str(Path(name).expanduser().resolve()) for name in data.train_files).items():
        if count > 1:
            yield f"data.train_files names {name} {count} times: each pass draws its rows as often"


def check_given(data: DataConfig) -> Iterator[Problem]:
    """Yield the problems of where rows come from, and of how a prompt is made of one."""
    ways = {
        "train_files": bool(data.train_files),
        "reasoning_gym": data.reasoning_gym is not None,
        "source": data.source is not None,
    }
    yield from _check_one_way(ways)
    if data.template is not None:
        yield from _check_template(data.template)
    if data.source is not None:
        yield from _check_source(data.source)


def check_sft_data(config: SftConfig, images: bool = False) -> Iterator[Problem]:
    """Yield every problem of the training and held-out examples; ``images`` are read of them too."""
    data = config.data
    seen = Read(images, data.image_key)
    ways = {"train_files": bool(data.train_files), "source": data.source is not None, "mix": bool(data.mix)}
    yield from _check_one_way(ways)
    if data.source is not None:
        yield from _check_source(data.source)
    shown = [] if data.image_key is None else [("data.image_key", data.image_key)]
    keys = [*_example_keys("data", example_columns(data)), *shown]
    if not data.mix:
        yield from _check_pair("data", example_columns(data))
    yield from check_files("data.train_files", data.train_files, keys, data.on_bad_row, seen)
    yield from check_files("data.val_files", data.val_files, keys, data.on_bad_row, seen)
    for files in (data.train_files, data.val_files):
        yield from check_forms(files, data.on_bad_row, _forms("data", example_columns(data)), seen)
    yield from check_overlap([*data.train_files, *(file for part in data.mix for file in part.files)], data.val_files)
    names = mix_names(data)
    for index, part in enumerate(data.mix):
        at = f"data.mix[{index}]"
        keys = [*_example_keys(at, example_columns(data, part)), *shown]
        yield from _check_tools(at, example_columns(data, part))
        yield from _check_pair(at, example_columns(data, part))
        yield from check_files(f"{at}.files", part.files, keys, data.on_bad_row, seen)
        yield from check_forms(part.files, data.on_bad_row, _forms(at, example_columns(data, part)), seen)
        if not part.files:
            yield Problem(f"{at}.files", [], "there is no data in this part", "Write its files")
        elif names[index] in names[:index]:
            reason = "another part of the mix is called so, and metrics would add them up"
            yield Problem(f"{at}.name", names[index], reason, "Write another name")


def _example_keys(at: str, columns: ExampleColumns) -> list[tuple[str, str]]:
    """Return (config key, column that the files must have) of an SFT data set whose keys stand at ``at``."""
    chat = columns.messages_key is not None or columns.chat
    tools = [(f"{at}.tools_key", columns.tools_key)] if columns.tools_key is not None and chat else []
    if columns.messages_key is not None:
        return [(f"{at}.messages_key", columns.messages_key), *tools]
    return [(f"{at}.prompt_key", columns.prompt_key), (f"{at}.response_key", columns.response_key), *tools]


def _forms(at: str, columns: ExampleColumns) -> dict[str, tuple[str, Form]]:
    """Map the keys of an SFT data set at ``at`` to their columns, and what those hold."""
    if columns.messages_key is not None:
        return {f"{at}.messages_key": (columns.messages_key, "messages")}
    return {f"{at}.prompt_key": (columns.prompt_key, "text"), f"{at}.response_key": (columns.response_key, "text")}


def _check_pair(at: str, columns: ExampleColumns) -> Iterator[Problem]:
    """Report a response that is its own prompt."""
    if columns.messages_key is None and columns.prompt_key == columns.response_key:
        reason = "it is the column of the prompts too: a model would learn to say again what it is asked"
        yield Problem(f"{at}.response_key", columns.response_key, reason, "Write the column of the responses")


def _check_tools(at: str, columns: ExampleColumns) -> Iterator[Problem]:
    """Report tools without a chat template: there is no other place for them."""
    if columns.tools_key is not None and columns.messages_key is None and not columns.chat:
        reason = "only a chat template has a place for tools, and these examples are prompt and response as plain text"
        yield Problem(f"{at}.tools_key", columns.tools_key, reason, f"Write {at}.chat: true, or leave it out")


def _column_keys(data: DataConfig) -> list[tuple[str, str]]:
    """Return (config key, column that the files must have)."""
    keys = [(f"data.extra_keys[{index}]", name) for index, name in enumerate(data.extra_keys)]
    if data.template is None:
        keys.append(("data.prompt_key", data.prompt_key))
    else:
        keys += [("data.template", name) for name in template_columns(data.template)]
    named = {
        "answer_key": data.answer_key,
        "uid_key": data.uid_key,
        "data_source_key": data.data_source_key,
        "image_key": data.image_key,
        "tools_key": data.tools_key if data.chat or data.template is None else None,  # else it has no place at all
    }
    return [*keys, *((f"data.{key}", name) for key, name in named.items() if name is not None)]


def template_columns(template: str | None) -> tuple[str, ...]:
    """Return the columns that a template names; none of one that ``_check_template`` reports."""
    try:
        return () if template is None else Template(template).columns
    except TemplateError:
        return ()


def _check_template(template: str) -> Iterator[Problem]:
    try:
        Template(template)
    except TemplateError as error:
        yield Problem("data.template", template, error.reason, REMEDY)


def _check_one_way(ways: dict[str, bool]) -> Iterator[Problem]:
    chosen = [f"data.{way}" for way, on in ways.items() if on]
    if not chosen:
        remedy = f"Write one of {', '.join(f'data.{way}' for way in ways)}"
        yield Problem("data.train_files", [], "there is no training data", remedy)
    elif len(chosen) > 1:
        yield Problem(chosen[1], "...", f"the training data come from {chosen[0]} already", "Keep one of the two")


def check_files(
    key: str, files: Sequence[str], columns: Columns, on_bad_row: str, seen: Read = TEXT_ALONE
) -> Iterator[Problem]:
    """Check whether each file can be read, its first rows have the columns, and all that they hold is read."""
    for index, name in enumerate(files):
        at = f"{key}[{index}]"
        try:
            (table,) = open_tables([name])
            first = list(islice(table.scan(), SAMPLED_ROWS))
        except (DataError, OSError) as error:
            yield Problem(at, name, _without_name(error, name), "Write an existing data file")
            continue
        rows = [row for row in first if isinstance(row, Row)]
        bad = [row for row in first if isinstance(row, RowError)]
        if not first:
            yield Problem(at, name, "there is no row in it", "Write a file with data")
        elif bad and on_bad_row == "error":
            yield Problem(at, name, _without_name(bad[0], name), "Mend the file, or write on_bad_row: drop")
        elif rows:
            yield from _check_columns(rows[:1] if on_bad_row == "error" else rows, columns)
        for column, held in islice((found for row in rows for found in seen.beyond(row)), 1):
            yield Problem(at, name, f"its rows have {held}, and {seen.words}", seen.remedy(column, held))


def _check_columns(rows: Sequence[Row], columns: Columns) -> Iterator[Problem]:
    """Check that a column is in the first row, or in one of the first where bad rows may be left out."""
    for key, column in columns:
        errors = [error for row in rows if (error := _lacks(row, column)) is not None]
        if len(errors) == len(rows):
            remedy = "Write a column of the file" + _ALSO.get(key, "").format(column)
            if rows[0].values.keys() >= {"chosen", "rejected"}:
                remedy += "; to learn from its preferences use tandem train with algorithm.policy_loss.type: dpo"
            yield Problem(key, column, f"{rows[0].table}: {str(errors[0]).partition(': ')[2]}", remedy)


def _lacks(row: Row, column: str) -> RowError | None:
    try:
        row.find(column)
    except RowError as error:
        return error
    return None


def check_overlap(train: Sequence[str], held_out: Sequence[str]) -> Iterator[Problem]:
    """Check whether a file is both trained on and held out."""
    resolved = {Path(name).expanduser().resolve() for name in train}
    for index, name in enumerate(held_out):
        if Path(name).expanduser().resolve() in resolved:
            reason = "the same file is trained on: held-out prompts must be others"
            yield Problem(f"data.val_files[{index}]", name, reason, "Split the file in two")


def _check_task(task: dict[str, Any]) -> Iterator[Problem]:
    key = "data.reasoning_gym"
    if not isinstance(task.get("dataset"), str):
        close = difflib.get_close_matches("dataset", list(map(str, task)), n=1)
        remedy = f"Write {key}.dataset, such as chain_sum" + (f"; there is {close[0]!r}" if close else "")
        yield Problem(f"{key}.dataset", task.get("dataset"), "the task is not named", remedy)
        return
    wrong = [Problem(f"{key}.{name}", task[name], reason, remedy) for name, reason, remedy in _wrong_counts(task)]
    yield from wrong
    if not wrong:
        try:
            TaskTable(**task)
        except DataError as error:
            yield Problem(key, task, str(error), "Correct the task")


def _wrong_counts(task: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, least in (("size", 1), ("seed", 0)):
        value = task.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int):
            yield name, "not a whole number", f"Write an integer >= {least}"
        elif value < least:
            yield name, "too small", f"Write an integer >= {least}"


def _check_source(source: SourceConfig) -> Iterator[Problem]:
    """Check whether the file of a user's data source defines its class, and takes its parameters; it is read, not
    run.
    """
    if source.file is None:
        yield from check_built_in_source(source)
        return
    file = Path(source.file).expanduser()
    found = describe_class(source.type, file, root=BaseDataSource.__name__)
    if isinstance(found, Signature):
        own = ("type", "file")
        yield from check_parameters("data.source", "data source", source.type, source.parameters, found, own)
    elif found.startswith(("can't be read", "not Python")):
        remedy = "Mend the file" if file.is_file() else "Write an existing Python file"
        yield Problem("data.source.file", source.file, found, remedy)
    else:
        yield Problem("data.source.type", source.type, f"{source.file} defines no such class", _sentence(found))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _without_name(error: Exception, name: str) -> str:
    return str(error).removeprefix(f"{name}: ").removeprefix(f"{name}, ")


def named_sources(data: DataConfig, files: Iterable[str]) -> list[str]:
    """Return the data sources that are known before a row is read: by the names of ``files``, or of the procedural
    task.

    None where rows tell; those are checked as they are read.
    """
    if data.data_source_key is not None or data.source is not None:
        return []
    if data.reasoning_gym is not None:
        named = data.reasoning_gym.get("dataset")
        return [named] if isinstance(named, str) else []
    return list(dict.fromkeys(PurePath(name).stem for name in files))
