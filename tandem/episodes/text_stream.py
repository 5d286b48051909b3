"""What may be sent of a turn while it is drawn: always a beginning of the text that it will have. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tandem.episodes.parsers import sign_of
from tandem.models.tokenizer import decode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part: TypeAlias = dict[str, Any]
"""``text``, and where details are asked for ``token_ids``, ``logprobs`` and ``texts`` of the tokens since the part
before."""

Hear: TypeAlias = Callable[[Part], None]
"""Takes the parts of a turn as they come; what it holds back is in the answer alone."""

_INCOMPLETE = "\ufffd"
_BRACKETS = {"llama3": "{", "pythonic": "["}
"""What a turn of these formats begins with where all of it is calls."""


class TextStream:
    """Turns tokens into text that can be relied on.

    Held back is whatever may become something else: a character whose bytes aren't all there, the beginning of a text
    of ``stop``, and with a ``tool_format`` calls, what may become one, and blanks at the end, which are no content.
    ``ends`` are end tokens. See ``reply_of``, whose content the parts are a beginning of.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        hear: Hear,
        *,
        tool_format: str | None = None,
        stop: Sequence[str] = (),
        details: bool = False,
    ) -> None:
        self._tokenizer, self._ends, self._hear = tokenizer, ends, hear
        self._format, self._stop, self._details = tool_format, stop, details
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._start, self._read, self._text = 0, 0, ""  # decoding goes on behind what was read
        self._sent, self._given = "", 0
        self._over = False

    def __call__(self, sample: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take tokens as they are drawn: a ``GroupRequest.watch`` of a request of one sample."""
        del sample
        if self._over:
            return
        self._ids += ids
        self._logprobs += logprobs
        text = self._safe()
        if not text.startswith(self._sent) or len(text) == len(self._sent):
            return
        part: Part = {"text": text[len(self._sent) :]}
        self._sent = text
        if self._details:
            new = slice(self._given, len(self._ids))
            self._given = len(self._ids)
            texts = [decode_text(self._tokenizer, [token]) for token in self._ids[new]]
            part |= {"token_ids": self._ids[new], "logprobs": self._logprobs[new], "texts": texts}
        self._hear(part)

    def _safe(self) -> str:
        """Return the beginning of the content that no later token changes."""
        text = self._decoded()
        if any(mark in text for mark in self._stop):
            self._over = True
            return self._sent
        if self._format is None:
            return text[: len(text) - _begun(text, self._stop)]
        text, sign = text.lstrip(), sign_of(self._format)
        if text.startswith(_BRACKETS.get(self._format, sign)):
            return ""
        text = text.partition(sign)[0] if sign else text
        marks = [*self._stop, *([sign] if sign else [])]
        return text[: len(text) - _begun(text, marks)].rstrip()

    def _decoded(self) -> str:
        """Return the text so far: some tokens before the new ones are decoded with them, for what stands between."""
        ids = self._ids[:-1] if self._ids and self._ids[-1] in self._ends else self._ids
        old = decode_text(self._tokenizer, ids[self._start : self._read])
        new = decode_text(self._tokenizer, ids[self._start :])
        if len(new) > len(old) and not new.endswith(_INCOMPLETE):
            self._text += new[len(old) :]
            self._start, self._read = self._read, len(ids)
        return self._text


def _begun(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` with which one of the ``marks`` begins."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
