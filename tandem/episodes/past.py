"""What a turn goes on from: the tokens so far and what new messages add, or a context that begins anew.

An episode may always append to what was said. Whether it may change or drop some of it, and whether the chat template
may, says ``Past``; what was sampled is never tokenised again as if it had been sampled so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tandem.base.errors import DataError
from tandem.data.chat import Message, encode_chat_prompt, render_chat
from tandem.data.tools import Tools, require_place_for_tools
from tandem.episodes.conversation import check_form, checked_new, continuation
from tandem.episodes.parsers import FORMATS
from tandem.models.tokenizer import decode_text, encode_plain, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Past = Literal["fixed", "edited", "template"]
"""``fixed``: nothing that was said changes. ``edited``: where the messages are others, the context begins anew there.
``template``: also where the chat template makes something else of the turns before."""


@dataclass(frozen=True)
class Added:
    """The ids that come before the next turn: after those that are there, or (``anew``) in their place."""

    ids: list[int]
    anew: bool = False


def after_messages(
    tokenizer: PreTrainedTokenizerBase,
    context: Sequence[int],
    known: Sequence[Message] | None,
    given: list[Message],
    *,
    ends: Sequence[int],
    tools: Tools | None,
    past: Past,
) -> Added:
    """Return what the messages ``given`` add to ``context``, in which those of ``known`` stand; None: it has others.

    Raises ``DataError`` for messages that nothing can follow, and under ``fixed`` for changed ones.
    """
    if past == "fixed":
        return Added(continuation(tokenizer, checked_new(known or [], given), context, ends, tools))
    check_form(given)
    if past == "template":
        text, before = (
            render_chat(tokenizer, given, add_generation_prompt=True, tools=tools),
            decode_text(tokenizer, context),
        )
        if text.startswith(before):
            return Added(encode_text(tokenizer, text[len(before) :]))
    elif known is not None and [plain(message) for message in given[: len(known)]] == [plain(m) for m in known]:
        new = given[len(known) :]
        if new and new[0].get("role") != "assistant":
            return Added(continuation(tokenizer, new, context, ends, tools))
    return Added(encode_chat_prompt(tokenizer, given, tools=tools)[1], anew=True)


def after_text(tokenizer: PreTrainedTokenizerBase, context: Sequence[int], text: str, *, past: Past) -> Added:
    """Return what ``text`` adds to ``context``, with whose text it begins. Raises ``DataError`` as ``after_messages``
    does.
    """
    before = decode_text(tokenizer, context)
    if context and text.startswith(before):
        return Added(encode_text(tokenizer, text[len(before) :]))
    if context and past == "fixed":
        raise DataError("the text doesn't begin with that of the turns before: give all of it, then yours")
    return Added(encode_plain(tokenizer, text), anew=bool(context))


def after_ids(context: Sequence[int], ids: Sequence[int], *, past: Past) -> Added:
    """Return what ``ids`` add to ``context``, with which they begin. Raises ``DataError`` as ``after_messages``
    does.
    """
    if list(ids[: len(context)]) == list(context):
        return Added(list(ids[len(context) :]))
    if past == "fixed":
        raise DataError("generate() goes on from the tokens of the turns before: give all of them, then yours")
    return Added(list(ids), anew=True)


def check_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Raise ``DataError`` for what is no prompt of tokens."""
    if not ids:
        raise DataError("generate() needs at least one token to go on from")
    vocabulary = len(tokenizer)
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:
        raise DataError(f"there is no token {wrong[0]}: the tokenizer has {vocabulary}")


def check_offer(tokenizer: PreTrainedTokenizerBase, tools: Tools, tool_format: str | None) -> None:
    """Raise ``DataError`` for tools that a model would not be shown, or whose calls could not be read."""
    if not tools:
        return
    require_place_for_tools(tokenizer)
    if tool_format is None:
        raise DataError(
            "the chat template doesn't show how the model writes calls: write "
            f"actor_rollout_ref.rollout.episode.tool_format, one of {', '.join(FORMATS)}"
        )


def plain(message: Mapping[str, Any]) -> Message:
    """Return what a message says, in one form: what clients add or spell in their own way is left out.

    >>> plain({"role": "assistant", "content": None, "refusal": None,
    ...        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}]})
    {'role': 'assistant', 'content': '', 'tool_calls': [{'id': '1', 'name': 'f', 'arguments': {'x': 1}}]}
    """
    found = {"role": message.get("role"), "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {"id": call.get("id"), "name": call["function"]["name"], "arguments": arguments(call["function"])}
            for call in calls
        ]
    return found


def arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as a mapping, also where they come as JSON text; text that is none as it is."""
    given = function.get("arguments")
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given
