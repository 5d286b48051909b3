"""Examples of supervised fine-tuning: rows become token ids and a mask of the tokens to learn, drawn like prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tandem.base.errors import DataError
from tandem.data.catalog import Catalog, OnBadRow, RowSkipped
from tandem.data.chat import (
    Endings,
    checked_messages,
    encode_conversation,
    encode_pair,
    refuse_rendered,
    require_chat_template,
)
from tandem.data.length import Overlong, cut
from tandem.data.mixture import Counted
from tandem.data.pictures import Shown, Sight
from tandem.data.rows import Row, RowError, Table
from tandem.data.shown import with_images
from tandem.data.tools import read_tools, require_place_for_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """``input_ids`` and ``loss_mask`` of equal length; 1 marks a token that is learned as a *target*.

    So the mask is not shifted, and the first token's has no effect: nothing precedes it. Both are compact int arrays.
    ``shown``: its images, in a run that reads some.
    """

    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    uid: str = ""
    cut: bool = False
    shown: Shown | None = None


@dataclass(frozen=True)
class ExampleColumns:
    """Which columns make an example: ``messages_key`` (a conversation), else ``prompt_key`` and ``response_key``.

    ``tools_key`` holds definitions of tools for the chat template, as a list of mappings or as JSON text. A pair is
    plain text with the tokenizer's end token after the response if ``add_eos``; with ``chat`` it is a conversation of a
    user's and an assistant's message.
    """

    messages_key: str | None = None
    prompt_key: str = "prompt"
    response_key: str = "response"
    chat: bool = False
    add_eos: bool = True
    tools_key: str | None = None

    @property
    def converses(self) -> bool:
        """Whether examples are conversations, which the chat template renders."""
        return self.chat or self.messages_key is not None


def fit_example(
    ids: Sequence[int], mask: Sequence[int], *, max_length: int, on_overlong: Overlong, where: str, uid: str = ""
) -> Example:
    """Return an ``Example`` of at most ``max_length`` tokens; ids and mask are cut alike.

    Raises ``DataError`` (begins with ``where``) or ``RowSkipped`` for one too long, as ``on_overlong`` says.
    """
    overlong = len(ids) > max_length
    if overlong and on_overlong is Overlong.DROP:
        raise RowSkipped("overlong")
    if overlong and on_overlong is Overlong.ERROR:
        raise DataError(
            f"{where}: the example has {len(ids)} tokens, more than max_length = {max_length}. "
            "Raise it, or set on_overlong to drop or right"
        )
    kept, learned = (cut(tokens, max_length, on_overlong) for tokens in (ids, mask))
    return Example(array("i", kept), array("b", learned), uid, overlong)


class ConversationSource(Counted[Example]):
    """A resumable stream of examples from ``tables``; ``counts`` says what became of their rows.

    A row in which no token would be learned (no assistant turn, or cut off) is a bad row. ``sight``: how images are
    read, where they are. Otherwise as ``PromptSource``.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        tokenizer: PreTrainedTokenizerBase,
        columns: ExampleColumns,
        max_length: int,
        on_overlong: Overlong = Overlong.ERROR,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        streaming: bool = False,
        sight: Sight | None = None,
    ) -> None:
        if columns.converses:
            require_chat_template(tokenizer)
        if columns.tools_key is not None:
            require_place_for_tools(tokenizer)

        endings = Endings()

        def encode(table: int, row: Row) -> Example:
            ids, mask, shown = encode_shown(tokenizer, columns, row, sight)
            if columns.converses:
                endings.add(tokenizer, ids, mask)
            where, uid = f"{row.table}, row {row.number}", f"{table}:{row.number}"
            example = fit_example(ids, mask, max_length=max_length, on_overlong=on_overlong, where=where, uid=uid)
            if not any(example.loss_mask[1:]):
                raise row.bad(
                    "nothing to learn", "no token of it would be learned: no assistant text within the length"
                )
            return replace(example, shown=shown)

        catalog = Catalog(tables, encode, on_bad_row=on_bad_row, streaming=streaming, sight=sight)
        endings.warn(tokenizer)
        self.counts = catalog.counts
        super().__init__(catalog, seed=seed, shuffle=shuffle, epochs=epochs, fingerprint=catalog.fingerprint)


def encode_example(
    tokenizer: PreTrainedTokenizerBase, columns: ExampleColumns, row: Row
) -> tuple[list[int], list[int]]:
    """Return the ids and mask of ``row``, nothing cut. Raises ``RowError``."""
    try:
        tools = read_tools(row, columns.tools_key)
        if columns.messages_key is not None:
            return encode_conversation(tokenizer, checked_messages(row.nested(columns.messages_key)), tools=tools)
        prompt, response = _text(row, columns.prompt_key), _text(row, columns.response_key)
        if columns.chat:
            refuse_rendered(tokenizer, prompt)
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            return encode_conversation(tokenizer, turns, tools=tools)
        return encode_pair(tokenizer, prompt, response, add_eos=columns.add_eos)
    except RowError:
        raise
    except DataError as error:
        raise row.bad("not encodable", str(error)) from error


def encode_shown(
    tokenizer: PreTrainedTokenizerBase, columns: ExampleColumns, row: Row, sight: Sight | None
) -> tuple[list[int], list[int], Shown | None]:
    """Return the ids and mask of ``row``, nothing cut, and the images that it shows. Raises ``RowError``."""
    if sight is None or not columns.converses:
        if sight is not None and sight.shows(row):
            raise row.bad("no place for images", "images belong to chat messages: write chat: true")
        return *encode_example(tokenizer, columns, row), None
    try:
        if columns.messages_key is not None:
            value = row.nested(columns.messages_key)
        else:
            value = [
                {"role": "user", "content": _text(row, columns.prompt_key)},
                {"role": "assistant", "content": _text(row, columns.response_key)},
            ]
        messages, pictures = with_images(sight, row, value)
        tools = read_tools(row, columns.tools_key)
        ids, mask = encode_conversation(tokenizer, messages, tools=tools, images=True)
        return *sight.expanded(ids, mask, pictures), Shown(pictures, sight.reader)
    except RowError:
        raise
    except DataError as error:
        raise row.bad("not encodable", str(error)) from error


def _text(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise row.bad("not text", f"column {key!r} is {value!r}, not text")
    return value
