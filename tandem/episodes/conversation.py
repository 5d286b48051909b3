"""From messages that follow a sampled turn to the token ids that follow it, and from ids back to a message.

The turn itself is never rendered: the new messages are put behind a stand-in of it, and what the chat template writes
after the end of that stand-in is encoded. So the ids of the past stay as they were sampled, whatever the template would
make of their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.data.chat import Message, render_chat
from tandem.data.tools import Tools
from tandem.models.tokenizer import decode_text, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "STANDIN"
_CALL_ID = "call00000"  # templates want nine letters and digits


def continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    context: Sequence[int],
    ends: Sequence[int],
    tools: Tools | None = None,
) -> list[int]:
    """Return ids of ``messages``, which follow the assistant's turn at the end of ``context``, up to the next turn.

    A turn that ended with none of ``ends``, since something cut it, is ended first. Raises ``DataError`` where the
    template refuses them, or doesn't end a turn.
    """
    talk = [{"role": "user", "content": "q"}, _stand_in(messages), *messages]
    text = render_chat(tokenizer, talk, add_generation_prompt=True, tools=tools)
    after = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else ""
    found = [(after.find(end), end) for end in (decode_text(tokenizer, [token]) for token in ends) if end in after]
    if not found:
        raise DataError(
            "the chat template doesn't end an assistant's turn with an end token of the model, so nothing can follow "
            "what was sampled"
        )
    place, end = min(found)
    behind = after[place:]
    lead, ids = encode_text(tokenizer, end), encode_text(tokenizer, behind)
    if ids[: len(lead)] != lead:
        raise DataError(f"the tokenizer merges the end of a turn {end!r} with what follows it, {behind[:20]!r}")
    return ids[len(lead) :] if context[-1] in ends else ids


def _stand_in(messages: Sequence[Message]) -> Message:
    """Return a turn of the assistant that ``messages`` may follow: one with calls, where they begin with answers to
    some.
    """
    answers = []
    for message in messages:
        if message.get("role") not in ("tool", "ipython"):
            break
        answers.append(message)
    calls = [
        {
            "id": answer.get("tool_call_id", _CALL_ID),
            "type": "function",
            "function": {"name": _MARK, "arguments": {}},
        }
        for answer in answers
    ]
    return {"role": "assistant", "content": _MARK, **({"tool_calls": calls} if calls else {})}


def turn_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: Sequence[int]) -> str:
    """Return the text of a sampled turn without its end token, special tokens shown."""
    kept = list(ids[:-1]) if ids and ids[-1] in ends else list(ids)
    return decode_text(tokenizer, kept)


def check_form(given: Any) -> None:
    """Raise ``DataError`` for what is no list of messages."""
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise DataError("chat() takes a list of messages {role, content}")
    for place, message in enumerate(given, 1):
        if not isinstance(message.get("role"), str):
            raise DataError(f"message {place} has no role: write {{'role': 'user', 'content': ...}}")


def checked_new(known: Sequence[Message], given: Any) -> list[Message]:
    """Return the messages of ``given`` after ``known``, with which they must begin. Raises ``DataError``."""
    check_form(given)
    if given[: len(known)] != list(known):
        place = next((i for i, (a, b) in enumerate(zip(known, given, strict=False)) if a != b), len(given))
        raise DataError(
            f"message {place + 1} is not what it was: what was said can't be changed, since it was sampled or answered "
            "already. Append to the messages, the assistant's own as chat() gave it"
        )
    new: list[Message] = given[len(known) :]
    if not new or new[0].get("role") == "assistant":
        raise DataError("nothing follows the assistant's turn: append a message of a user or a tool before chat()")
    return new
