"""Prompts: rows of tables become ``Prompt``s, drawn in a seeded, resumable order.

A prompt is encoded, cut to length and checked here and nowhere else: the engine and the trainer get the same ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from tandem.base.errors import DataError
from tandem.data.catalog import Catalog, OnBadRow, RowCounts, RowSkipped
from tandem.data.chat import (
    Message,
    checked_messages,
    encode_chat_prompt,
    refuse_rendered,
    refuse_written_messages,
    require_chat_template,
)
from tandem.data.length import Overlong, cut
from tandem.data.pictures import Picture, Shown, Sight
from tandem.data.rows import Row, RowError, Table
from tandem.data.sampler import Sampler
from tandem.data.shown import with_images
from tandem.data.template import Template
from tandem.data.tools import Tools, read_tools, require_place_for_tools
from tandem.models.tokenizer import begins, decode_text, encode_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One question to the model.

    ``uid`` names its row; ``prompt_ids`` is what the model gets and ``text`` what these ids say; ``extra_info`` are
    further columns for the scorer; ``messages`` is the conversation it came from, if any; ``cut``: shortened to length;
    ``shown``: its images, in a run that reads some.
    """

    uid: str
    prompt_ids: tuple[int, ...]
    text: str
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None
    cut: bool = False
    shown: Shown | None = None


@dataclass(frozen=True)
class PromptColumns:
    """Which columns of a row make a prompt.

    ``prompt_key`` holds text or chat messages; ``template`` builds the text from several columns instead, as
    ``Template`` says (``"{x:2d}+{y:2d}="``). ``chat`` wraps text as a user message, after ``system_prompt`` if given.
    ``tools_key`` holds definitions of tools for the chat template, as a list of mappings or as JSON text; ``tools`` are
    those of rows without any.
    ``uid_key`` None: the uid is "table index:row number". ``data_source_key`` None: the file's name without its ending.
    A key may reach into a nested column by dots (``reward_model.ground_truth``).
    """

    prompt_key: str = "prompt"
    answer_key: str | None = None
    data_source_key: str | None = None
    uid_key: str | None = None
    extra_keys: tuple[str, ...] = ()
    template: str | None = None
    chat: bool = False
    system_prompt: str | None = None
    tools_key: str | None = None
    tools: Tools | None = None


@dataclass(frozen=True)
class Rendered:
    """A whole prompt before the length policy: its text, ids, messages if it is a chat, and the images it shows."""

    text: str
    ids: list[int]
    messages: tuple[Message, ...] | None
    shown: Shown | None = None

    @property
    def content(self) -> str:
        """What tells it from other prompts: its text and its images."""
        return "\0".join([self.text, *(one.digest for one in (self.shown.pictures if self.shown else ()))])


class PromptEncoder:
    """Turns a row into a ``Prompt`` of at most ``max_prompt_length`` tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: PromptColumns,
        *,
        max_prompt_length: int,
        on_overlong: Overlong = Overlong.ERROR,
        sight: Sight | None = None,
    ) -> None:
        if columns.chat:
            require_chat_template(tokenizer)
        self._sight = sight
        if columns.tools_key is not None or columns.tools is not None:
            require_place_for_tools(tokenizer)
        if columns.system_prompt is not None and not columns.chat:
            raise DataError("system_prompt is used with chat: true only: set chat: true, or write it into the prompt")
        self._tokenizer = tokenizer
        self._columns = columns
        self._template = None if columns.template is None else Template(columns.template)
        self._limit = max_prompt_length
        self._on_overlong = on_overlong

    def render(self, row: Row) -> Rendered:
        """Return the whole prompt of ``row``. Raises ``RowError``."""
        value = row.nested(self._columns.prompt_key) if self._template is None else self._template.fill(row)
        return self.render_value(row, value)

    def render_value(self, row: Row, value: object, *, chat: bool = False) -> Rendered:
        """Return the whole prompt that ``value``, text or messages, is; ``chat``: text is a user's message in any
        case.
        """
        tools = read_tools(row, self._columns.tools_key)
        try:
            if isinstance(value, str) and not (chat or self._columns.chat):
                if self._sight is not None and self._sight.shows(row):
                    raise row.bad("no place for images", "images belong to chat messages: write chat: true")
                if tools is not None:
                    raise row.bad("no place for tools", "tools belong to chat messages: write chat: true")
                refuse_written_messages(value)
                nothing = None if self._sight is None else Shown((), self._sight.reader)
                return Rendered(value, encode_plain(self._tokenizer, value), None, nothing)
            messages, pictures = self._messages(row, value)
            tools = self._columns.tools if tools is None else tools
            text, ids = encode_chat_prompt(self._tokenizer, messages, tools=tools)
            if self._sight is None:
                return Rendered(text, ids, tuple(messages))
            ids, _ = self._sight.expanded(ids, [0] * len(ids), pictures)
            return Rendered(text, ids, tuple(messages), Shown(pictures, self._sight.reader))
        except RowError:
            raise
        except DataError as error:
            raise row.bad("not encodable", str(error)) from error

    def prompt(self, table: int, row: Row, whole: Rendered) -> Prompt:
        """Return the prompt of ``row``, cut to length. Raises ``RowError``, or ``RowSkipped`` for one to be dropped."""
        if not whole.ids:
            raise row.bad("empty", "the prompt is empty: it has no token")
        if whole.shown is not None and whole.shown.pictures and self._on_overlong in (Overlong.LEFT, Overlong.RIGHT):
            self._refuse_cut(row, whole.ids)
        ids = self._fit(row, whole.ids)
        shortened = len(ids) < len(whole.ids)
        columns = self._columns
        return Prompt(
            uid=f"{table}:{row.number}" if columns.uid_key is None else row.named(columns.uid_key),
            prompt_ids=tuple(ids),
            text=decode_text(self._tokenizer, ids) if shortened else whole.text,
            ground_truth=None if columns.answer_key is None else _known(row, columns.answer_key),
            data_source=PurePath(row.table).stem
            if columns.data_source_key is None
            else row.named(columns.data_source_key),
            extra_info={key: row.savable(key) for key in columns.extra_keys},
            messages=whole.messages,
            cut=shortened,
            shown=whole.shown,
        )

    def _messages(self, row: Row, value: object) -> tuple[list[Message], tuple[Picture, ...]]:
        """Return the messages that ``value`` is, and the images that they show."""
        pictures: tuple[Picture, ...] = ()
        if isinstance(value, str):
            refuse_rendered(self._tokenizer, value)
            value = [{"role": "user", "content": value}]
        elif not isinstance(value, Sequence) or isinstance(value, bytes):
            key = self._columns.prompt_key
            raise row.bad("not text", f"column {key!r} is {value!r}, neither text nor a list of messages")
        if self._sight is not None:
            value, pictures = with_images(self._sight, row, value)
        messages = checked_messages(value, images=self._sight is not None)
        if self._columns.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._columns.system_prompt})
        return messages, pictures

    def _refuse_cut(self, row: Row, ids: Sequence[int]) -> None:
        if len(ids) > self._limit:
            raise row.bad("overlong", f"the prompt has {len(ids)} tokens, and one that shows images can't be cut")

    def _fit(self, row: Row, ids: Sequence[int]) -> Sequence[int]:
        if len(ids) > self._limit and self._on_overlong is Overlong.DROP:
            raise RowSkipped("overlong")
        if len(ids) > self._limit and self._on_overlong is Overlong.ERROR:
            raise DataError(
                f"{row.table}, row {row.number}: the prompt has {len(ids)} tokens, more than max_prompt_length = "
                f"{self._limit}. Raise it, or set on_overlong_prompt to drop, left or right"
            )
        return cut(ids, self._limit, self._on_overlong, begins=begins(self._tokenizer, ids))


class PromptSource(Sampler[Prompt]):
    """A resumable stream of prompts from ``tables``; ``counts`` says what became of their rows.

    ``streaming`` keeps the rows on disk; the order and the prompts are the same. Rows whose whole prompt text equals
    one of the tables ``held_out``, or whose uid is in ``exclude_uids``, are left out and counted. ``taught``: the data
    sources that have a teacher; a row of another is a bad row. ``sight``: how images are read, where they
    are. ``items`` are the prompts in the order of the tables,
    for evaluation. Raises ``DataError`` with file and row for what can't be used.
    """

    counts: RowCounts

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        tokenizer: PreTrainedTokenizerBase,
        columns: PromptColumns,
        max_prompt_length: int,
        on_overlong: Overlong = Overlong.ERROR,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        streaming: bool = False,
        held_out: Sequence[Table] = (),
        exclude_uids: Collection[str] = (),
        taught: Collection[str] | None = None,
        sight: Sight | None = None,
    ) -> None:
        encoder = PromptEncoder(
            tokenizer, columns, max_prompt_length=max_prompt_length, on_overlong=on_overlong, sight=sight
        )
        held, excluded = held_out_texts(encoder, held_out, on_bad_row), frozenset(exclude_uids)

        def encode(table: int, row: Row) -> Prompt:
            whole = encoder.render(row)
            if held and digest(whole.content) in held:
                raise RowSkipped("held out")
            prompt = encoder.prompt(table, row, whole)
            if prompt.uid in excluded:
                raise RowSkipped("excluded")
            if taught is not None and prompt.data_source not in taught:
                raise row.bad("no teacher", _untaught(prompt.data_source, taught))
            return prompt

        catalog = Catalog(tables, encode, on_bad_row=on_bad_row, streaming=streaming, sight=sight)
        self.counts = catalog.counts
        super().__init__(catalog, seed=seed, shuffle=shuffle, epochs=epochs, fingerprint=catalog.fingerprint)


class Renders(Protocol):
    """What makes a prompt of a row. ``PromptEncoder`` does."""

    def render(self, row: Row) -> Rendered:
        """Return the whole prompt of ``row``. Raises ``RowError``."""


def held_out_texts(encoder: Renders, tables: Sequence[Table], on_bad_row: OnBadRow) -> frozenset[bytes]:
    """Return the digests of the prompts of ``tables``, to tell what training must leave out."""
    texts = set()
    for table in tables:
        for row in table.scan():
            try:
                if isinstance(row, RowError):
                    raise row
                texts.add(digest(encoder.render(row).content))
            except RowError:
                if on_bad_row is OnBadRow.ERROR:
                    raise
    return frozenset(texts)


def _untaught(source: str, taught: Collection[str]) -> str:
    return (
        f"data source {source!r} has no teacher; {', '.join(map(repr, taught))} have one. Name its own in "
        "actor_rollout_ref.teacher.by_source, or one for the rest in actor_rollout_ref.teacher.path"
    )


def digest(text: str) -> bytes:
    """Return a short stand-in for a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _known(row: Row, key: str) -> object:
    """Return the value of column ``key``, which is not null and can be saved."""
    row[key]
    return row.savable(key)
