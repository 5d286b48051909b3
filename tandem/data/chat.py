"""Conversations: from chat messages to token ids, and to the mask of the tokens that a model should learn to write.

The ids are always those of the *whole* rendered conversation, tokenised once. The mask is found by rendering the
conversation up to each assistant turn: where a prefix of the messages is not a prefix of the whole, in text or in
tokens, no mask can be trusted and the conversation is refused (or the template's own ``{% generation %}`` marks serve).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tandem.base.errors import DataError
from tandem.data.modalities import kind_in_messages
from tandem.data.tools import Tools
from tandem.models.tokenizer import decode_text, encode_plain, encode_text, end_ids, rendered_opening
from tandem.models.tool_calls import fit_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
logger = logging.getLogger(__name__)

_WRITTEN_MESSAGES = re.compile(r"\s*\[\s*\{\s*(?:\"(?:role|content)\"|'(?:role|content)')\s*:")
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def checked_messages(value: object, *, images: bool = False) -> list[Message]:
    """Return ``value`` as chat messages: a non-empty list of {role, content}. Raises ``DataError`` that says what is
    wrong. ``images``: parts of messages may be such.

    Null fields are left out: tables of nested rows write them where a message lacks the field.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DataError(f"a conversation is a list of messages {{role, content}}, not a {type(value).__name__}")
    if not value:
        raise DataError("the list of messages is empty")
    messages = []
    for i, given in enumerate(value, start=1):
        if not isinstance(given, Mapping):
            raise DataError(f"message {i} is a {type(given).__name__}, not a mapping of role and content")
        message = {str(key): field for key, field in given.items() if field is not None}
        if not isinstance(message.get("role"), str):
            raise DataError(
                f"message {i} has no role (it has {', '.join(message) or 'nothing'}): write role and content"
            )
        if not isinstance(message.get("content", "" if "tool_calls" in message else None), str | list):
            raise DataError(f"message {i} ({message['role']}) has no content: write text, if only an empty one")
        if (kind := kind_in_messages([message], images=images)) is not None:
            raise DataError(
                f"message {i} ({message['role']}) has a part of the type {kind}: models are trained on "
                f"{'text and images' if images else 'text'} alone, so leave such rows out"
            )
        messages.append(message)
    return messages


def refuse_written_messages(text: str) -> None:
    """Raise ``DataError`` for text that is messages, written as JSON or as Python shows them: it would be learned as
    it stands.
    """
    if _WRITTEN_MESSAGES.match(text):
        raise DataError(
            f"the text begins with {text.strip()[:30]!r}, which is a list of messages written as text: store the "
            "column as a list of {role, content}"
        )


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``DataError`` if ``tokenizer`` can't render messages."""
    if not tokenizer.chat_template:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template: use an instruction-tuned model, name a "
            "file of one as data.chat_template, or use plain text (chat: false)"
        )


def refuse_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Raise ``DataError`` for text that a template was applied to already: one inside another is no conversation. Nor
    are messages that were written as text.
    """
    refuse_written_messages(text)
    opening = rendered_opening(tokenizer, text)
    if opening is not None:
        raise DataError(
            f"the text begins with {opening!r}, so a chat template was applied to it already, and chat: true would put "
            "it into the template once more: write chat: false, or give text without the template"
        )


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Tools | None = None,
) -> str:
    """Return the text that the chat template makes of ``messages``. Raises ``DataError`` where the template refuses
    them.

    ``tools`` are definitions of the tools that the assistant may call, in the form that the template expects. Calls of
    them get their arguments in the form that it expects.
    """
    require_chat_template(tokenizer)
    messages = fit_calls(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template is foreign code: it raises what it likes
        roles = ", ".join(str(m.get("role")) for m in messages) or "none"
        raise DataError(f"the chat template refuses messages with roles {roles}: {error}") from error
    return str(text)


def encode_chat_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: Tools | None = None
) -> tuple[str, list[int]]:
    """Return the text and ids of ``messages`` up to where the assistant begins to write."""
    if messages[-1].get("role") == "assistant":
        raise DataError("the last message is the assistant's: a prompt ends with the turn that it should answer")
    text = render_chat(tokenizer, messages, add_generation_prompt=True, tools=tools)
    return text, encode_text(tokenizer, text)


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    given: int = 0,
    tools: Tools | None = None,
    images: bool = False,
) -> tuple[list[int], list[int]]:
    """Return the ids of the whole conversation and a mask of equal length: 1 on assistant text and the end of its turn,
    else 0.

    The header that opens an assistant turn (the generation prompt) is not learned, nor are the first ``given``
    messages, nor what a template writes after the end token of a turn: a model stops there. Raises ``DataError`` for
    malformed messages and for a template that does not render a beginning of the conversation as a beginning of its
    text.
    """
    turns = checked_messages(messages, images=images)
    render = partial(render_chat, tokenizer, tools=tools)
    text = render(turns, add_generation_prompt=False)
    ids = encode_text(tokenizer, text)
    mask = [0] * len(ids)
    for i, turn in enumerate(turns):
        if i < given or turn["role"] != "assistant":
            continue
        try:
            start, stop = _span(tokenizer, render, turns, i, text, ids)
        except _Unstable as unstable:
            if GENERATION_MARK.search(tokenizer.get_chat_template()):
                return _by_generation_marks(tokenizer, turns, ids, tools)
            raise DataError(
                f"no loss mask for message {i + 1}: {unstable}. Use a chat template whose earlier turns don't "
                "depend on later ones, or mark the assistant's text in it with {% generation %} … {% endgeneration %}"
            ) from None
        mask[start:stop] = _until_end(ids[start:stop], end_ids(tokenizer))
    return ids, mask


def _until_end(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return 1 up to the first end token, which is learned, then 0."""
    place = next((i for i, token in enumerate(ids, start=1) if token in ends), len(ids))
    return [1] * place + [0] * (len(ids) - place)


def last_learned(ids: Sequence[int], mask: Sequence[int]) -> list[int]:
    """Return the last token of each stretch that is learned."""
    return [ids[i] for i, on in enumerate(mask) if on and not any(mask[i + 1 : i + 2])]


@dataclass
class Endings:
    """How the learned turns of many conversations end. A model learns to stop only where they end with an end token."""

    turns: int = 0
    endless: int = 0
    example: str = ""

    def add(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[int]) -> None:
        """Count the turns of a conversation before it is cut to length."""
        for token in last_learned(ids, mask):
            self.turns += 1
            if token not in end_ids(tokenizer):
                self.endless += 1
                self.example = self.example or decode_text(tokenizer, [token])

    def warn(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tell, once for all, what can't be learned and what to do."""
        if self.endless:
            ends = ", ".join(repr(decode_text(tokenizer, [token])) for token in sorted(end_ids(tokenizer))) or "none"
            ending = f"{self.endless} of {self.turns} learned turns end with {self.example!r}"
            logger.warning("%s", endless_turns(ending, ends))


def endless_turns(ending: str, ends: str) -> str:
    """Return a message that turns end with no end token, as ``ending`` says, and the remedy; ``ends`` are the model's
    own.
    """
    return (
        f"{ending}, which is no end token of the model (it has {ends}): it would not learn to stop. Let the chat "
        "template end each assistant turn with an end token, or name the template's own: eos_token in "
        "tokenizer_config.json, or eos_token_id in generation_config.json (several are a list)"
    )


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, *, add_eos: bool = True
) -> tuple[list[int], list[int]]:
    """Return the ids of ``prompt`` then ``response`` (then the end token) and a mask that is 1 on the response and its
    end.

    The prompt gets the very ids that it has when a model is asked to continue it. Raises ``DataError`` if the tokenizer
    can't write the response after them, or lacks an end token.
    """
    head, whole = encode_plain(tokenizer, prompt), encode_plain(tokenizer, prompt + response)
    if whole[: len(head)] == head:
        tail = whole[len(head) :]
    else:
        # A token of the whole text would span both. The model never sees it: it continues the prompt's own ids.
        tail = encode_text(tokenizer, response)
        if decode_text(tokenizer, head + tail) != decode_text(tokenizer, head) + response:
            raise DataError(
                f"the tokenizer merges the end of the prompt {prompt[-10:]!r} with the response {response[:10]!r}: "
                "move the space or line break between them from the prompt to the response"
            )
    if add_eos:
        if tokenizer.eos_token_id is None:
            raise DataError(f"tokenizer {tokenizer.name_or_path!r} has no end token: set add_eos: false, or eos_token")
        if tail[-1:] != [tokenizer.eos_token_id]:
            tail = [*tail, tokenizer.eos_token_id]
    return head + tail, [0] * len(head) + [1] * len(tail)


class Render(Protocol):
    """A function that makes one text of the messages of a conversation, by a chat template."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the text of ``messages``, and with ``add_generation_prompt`` the header of the assistant's next
        turn.
        """


class _Unstable(Exception):
    """A beginning of the conversation is not a beginning of the whole."""


def _span(
    tokenizer: PreTrainedTokenizerBase, render: Render, turns: list[Message], i: int, text: str, ids: list[int]
) -> tuple[int, int]:
    """Return the first token of what the assistant writes in turn ``i``, and the first token after the turn."""
    opened = _opened(render, turns, i)
    closed = render(turns[: i + 1], add_generation_prompt=False)
    start, stop = _boundary(tokenizer, opened, text, ids), _boundary(tokenizer, closed, text, ids)
    content = turns[i].get("content", "")
    sure = i > 0 and opened != render(turns[:i], add_generation_prompt=False)
    if not sure and isinstance(content, str):
        # No generation prompt seen: right only if the turn has no header that would then be learned as if written.
        written = closed[len(opened) :].lstrip()
        if not written.startswith(content.strip()):
            raise _Unstable(f"the template ignores add_generation_prompt, and the turn begins with {written[:20]!r}")
    return start, stop


def _opened(render: Render, turns: list[Message], i: int) -> str:
    """Return the text up to where the assistant begins to write turn ``i``."""
    if i > 0:
        return render(turns[:i], add_generation_prompt=True)
    # Nothing can be rendered before the first turn: its header is what the generation prompt adds after it.
    first = render(turns[:1], add_generation_prompt=False)
    header = render(turns[:1], add_generation_prompt=True).removeprefix(first)
    if not header:
        return ""
    before, found, _ = first.partition(header)
    if not found:
        raise _Unstable(f"the conversation begins with the assistant, but not with the header {header[-20:]!r}")
    return before + header


def _boundary(tokenizer: PreTrainedTokenizerBase, beginning: str, text: str, ids: list[int]) -> int:
    if not text.startswith(beginning):
        same = next(k for k, c in enumerate(beginning) if text[k : k + 1] != c)
        raise _Unstable(
            f"the template renders the turns up to it as …{beginning[same : same + 20]!r} alone, "
            f"and as …{text[same : same + 20]!r} within the whole"
        )
    part = encode_text(tokenizer, beginning)
    if ids[: len(part)] != part:
        raise _Unstable(f"a token spans the boundary after {beginning[-10:]!r}")
    return len(part)


def _by_generation_marks(
    tokenizer: PreTrainedTokenizerBase, turns: list[Message], ids: list[int], tools: Tools | None
) -> tuple[list[int], list[int]]:
    encoded: Any = tokenizer.apply_chat_template(
        fit_calls(tokenizer, turns),
        tools=None if tools is None else list(tools),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    if list(encoded["input_ids"]) != ids:
        raise DataError("the chat template's {% generation %} marks change the tokens of the conversation")
    mask = [int(m) for m in encoded["assistant_masks"]]
    start = 0
    while 1 in mask[start:]:
        start = mask.index(1, start)
        stop = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
        mask[start:stop] = _until_end(ids[start:stop], end_ids(tokenizer))
        start = stop
    return ids, mask
