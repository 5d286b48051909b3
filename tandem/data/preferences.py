"""Preferences: rows become a prompt with the answers given to it, the better one marked; drawn like prompts.

A row is a pair (a better and a worse answer), or one answer with a label. An answer is text, or chat messages that go
on after the prompt's, or a whole conversation that begins with the prompt's messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.data.catalog import Catalog, OnBadRow, RowCounts, RowSkipped
from tandem.data.chat import Endings, Message, checked_messages, encode_conversation, encode_pair
from tandem.data.length import Overlong, cut
from tandem.data.pictures import Shown, Sight
from tandem.data.prompts import PromptColumns, PromptEncoder, Rendered, digest, held_out_texts
from tandem.data.rows import Row, Table
from tandem.data.sampler import Sampler
from tandem.data.tools import read_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    """``ids`` after the prompt's, and of each whether it is ``learned`` (the assistant's, not another turn's)."""

    ids: Sequence[int]
    learned: Sequence[int]
    preferred: bool


@dataclass(frozen=True)
class Preference:
    """A prompt and the answers given to it: a better and a worse one, in this order, or one with its label.

    ``uid`` names its row; ``cut``: prompt or answer were shortened to length; ``shown``: the images of the prompt, in a
    run that reads some.
    """

    uid: str
    prompt_ids: tuple[int, ...]
    text: str
    answers: tuple[Answer, ...]
    data_source: str = ""
    cut: bool = False
    shown: Shown | None = None


@dataclass(frozen=True)
class PreferenceColumns:
    """Which columns of a row make a preference: those of the ``prompt``, and of a pair or of a labelled answer.

    With ``label`` None a row is a pair.
    """

    prompt: PromptColumns
    chosen: str = "chosen"
    rejected: str = "rejected"
    label: str | None = None
    response: str = "response"

    @property
    def answers(self) -> tuple[str, ...]:
        """The names of the columns that hold answers: two of a pair, or one with a label."""
        return (self.chosen, self.rejected) if self.label is None else (self.response,)


@dataclass(frozen=True)
class Lengths:
    """Most tokens of a prompt and of an answer, and what to do with more."""

    prompt: int
    response: int
    on_overlong_prompt: Overlong = Overlong.ERROR
    on_overlong_response: Overlong = Overlong.ERROR


class PreferenceEncoder:
    """Turns a row into a ``Preference``."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: PreferenceColumns,
        lengths: Lengths,
        sight: Sight | None = None,
    ) -> None:
        self._tokenizer, self._columns, self._lengths, self._sight = tokenizer, columns, lengths, sight
        self.endings = Endings()
        self._prompts = PromptEncoder(
            tokenizer,
            columns.prompt,
            max_prompt_length=lengths.prompt,
            on_overlong=lengths.on_overlong_prompt,
            sight=sight,
        )

    def render(self, row: Row) -> Rendered:
        """Return the whole prompt of ``row``. Raises ``RowError``."""
        return self._read(row)[0]

    def preference(self, table: int, row: Row, whole: Rendered) -> Preference:
        """Return the preference of ``row``. Raises ``RowError``, or ``RowSkipped`` for one to be dropped."""
        values = self._read(row)[1]
        prompt = self._prompts.prompt(table, row, whole)
        columns, labels = self._columns, self._labels(row)
        answers = []
        shortened = prompt.cut
        for column, value, preferred in zip(columns.answers, values, labels, strict=True):
            ids, learned = self._answer(row, column, whole, value)
            kept = self._fit(row, column, ids)
            shortened |= len(kept) < len(ids)
            if not any(learned[: len(kept)]):
                raise row.bad("nothing to learn", f"column {column!r} holds no answer within the length")
            answers.append(Answer(array("i", kept), array("b", learned[: len(kept)]), preferred))
        if len(answers) == 2 and answers[0].ids == answers[1].ids:
            raise row.bad("equal answers", f"columns {columns.chosen!r} and {columns.rejected!r} hold the same answer")
        given = (prompt.uid, prompt.prompt_ids, prompt.text, tuple(answers), prompt.data_source, shortened)
        return Preference(*given, shown=prompt.shown)

    def _read(self, row: Row) -> tuple[Rendered, list[Any]]:
        """Return the prompt, and each answer as text or as the messages that go on after the prompt's."""
        values = [self._value(row, column) for column in self._columns.answers]
        talks = [value for value in values if not isinstance(value, str)]
        if talks and len(talks) < len(values):
            raise row.bad("mixed answers", f"one of {', '.join(self._columns.answers)} is text, the other is messages")
        if talks and talks[0][0]["role"] != "assistant":
            given = _prompt_of(row, talks)
            return self._prompts.render_value(row, talks[0][:given]), [talk[given:] for talk in talks]
        if talks and self._columns.prompt.template is None:
            value = row.nested(self._columns.prompt.prompt_key)
            return self._prompts.render_value(row, value, chat=True), values
        return self._prompts.render(row), values

    def _value(self, row: Row, column: str) -> str | list[Message]:
        value = row.nested(column)
        if isinstance(value, str):
            return value
        try:
            return checked_messages(value, images=self._sight is not None)
        except DataError as error:
            raise row.bad("not text", f"column {column!r}: {error}") from error

    def _labels(self, row: Row) -> tuple[bool, ...]:
        key = self._columns.label
        if key is None:
            return True, False
        label = row[key]
        if label not in (True, False):  # 0 and 1 are equal to them
            raise row.bad(
                "not a label", f"column {key!r} is {label!r}: write true for a good answer, false for a bad one"
            )
        return (bool(label),)

    def _answer(
        self, row: Row, column: str, whole: Rendered, value: str | list[Message]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ids and mask of what follows the whole prompt."""
        try:
            if whole.messages is None and isinstance(value, str):
                ids, mask = encode_pair(self._tokenizer, whole.text, value)
            else:
                turns = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
                before = list(whole.messages or ())
                tools = read_tools(row, self._columns.prompt.tools_key)
                talk, images = [*before, *turns], self._sight is not None
                ids, mask = encode_conversation(self._tokenizer, talk, given=len(before), tools=tools, images=images)
                self.endings.add(self._tokenizer, ids, mask)
                if self._sight is not None and whole.shown is not None:
                    ids, mask = self._sight.expanded(ids, mask, whole.shown.pictures)
        except DataError as error:
            raise row.bad("not encodable", f"column {column!r}: {error}") from error
        length = len(whole.ids)
        if ids[:length] != whole.ids:
            detail = f"column {column!r}: the chat template renders the prompt otherwise once it is answered"
            raise row.bad("not encodable", detail)
        return ids[length:], mask[length:]

    def _fit(self, row: Row, column: str, ids: Sequence[int]) -> Sequence[int]:
        limit, policy = self._lengths.response, self._lengths.on_overlong_response
        if len(ids) > limit and policy is Overlong.DROP:
            raise RowSkipped("overlong answer")
        if len(ids) > limit and policy is Overlong.ERROR:
            raise DataError(
                f"{row.table}, row {row.number}: {column!r} has {len(ids)} tokens, more than max_response_length = "
                f"{limit}. Raise it, or set on_overlong_response to drop or right"
            )
        return cut(ids, limit, policy)


class PreferenceSource(Sampler[Preference]):
    """A resumable stream of preferences from ``tables``; ``counts`` says what became of their rows.

    Rows whose prompt is one of the tables ``held_out`` are left out and counted. Otherwise as ``PromptSource``.
    """

    counts: RowCounts

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        tokenizer: PreTrainedTokenizerBase,
        columns: PreferenceColumns,
        lengths: Lengths,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        streaming: bool = False,
        held_out: Sequence[Table] = (),
        sight: Sight | None = None,
    ) -> None:
        encoder = PreferenceEncoder(tokenizer, columns, lengths, sight)
        held = held_out_texts(encoder, held_out, on_bad_row)

        def encode(table: int, row: Row) -> Preference:
            whole = encoder.render(row)
            if held and digest(whole.content) in held:
                raise RowSkipped("held out")
            return encoder.preference(table, row, whole)

        catalog = Catalog(tables, encode, on_bad_row=on_bad_row, streaming=streaming, sight=sight)
        encoder.endings.warn(tokenizer)
        self.counts = catalog.counts
        super().__init__(catalog, seed=seed, shuffle=shuffle, epochs=epochs, fingerprint=catalog.fingerprint)


def _prompt_of(row: Row, talks: Sequence[list[Message]]) -> int:
    """Return the number of messages of whole conversations that are the prompt: those before the answer of the
    assistant.
    """
    if len(talks) == 1:
        given = len(talks[0]) - 1
    else:
        shared = (one == other for one, other in zip(*talks, strict=False))
        given = next((i for i, same in enumerate(shared) if not same), min(map(len, talks)))
        given = min(given, *(len(talk) - 1 for talk in talks))
        while given and any(talk[given]["role"] != "assistant" for talk in talks):
            given -= 1
    if not given or any(talk[given]["role"] != "assistant" for talk in talks):
        raise row.bad("no prompt", "the conversations have no beginning in common that the assistant answers")
    return given
