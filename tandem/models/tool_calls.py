"""Calls of tools in messages, with their arguments as a chat template wants them.

Data hold a call's arguments as a mapping or as JSON text (OpenAI's form), and templates take the one or the other: one
that writes ``arguments | tojson`` would encode a text twice, one that writes ``arguments`` would show Python's spelling
of a mapping. What a template wants is found by a probe, and the arguments are turned into that.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBED = {"key": "value"}
_AS_PYTHON = re.compile(r"'key'\s*:\s*'value'")
_AS_JSON = re.compile(r'"key"\s*:\s*"value"')


def fit_calls(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with the arguments of calls in the form that the chat template wants.

    Raises ``DataError`` for calls that are malformed.
    """
    return [_fit_message(tokenizer, message, i) for i, message in enumerate(messages, start=1)]


def _fit_message(tokenizer: PreTrainedTokenizerBase, message: Mapping[str, Any], number: int) -> dict[str, Any]:
    fitted = dict(message)
    if "tool_calls" in fitted:
        calls = fitted["tool_calls"]
        try:
            calls = json.loads(calls) if isinstance(calls, str) else calls
        except (ValueError, RecursionError) as error:
            raise DataError(f"message {number}: tool_calls is text, but no JSON: {error}") from error
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise DataError(f"message {number}: tool_calls is {str(calls)[:60]!r}: write a list of calls")
        fitted["tool_calls"] = [_fit_call(tokenizer, call, number) for call in calls]
    if isinstance(fitted.get("function_call"), Mapping):
        fitted["function_call"] = _fit_call(tokenizer, fitted["function_call"], number)
    return fitted


def _fit_call(tokenizer: PreTrainedTokenizerBase, call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return one call, whose name and arguments stand in it or in its ``function``."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _fit_call(tokenizer, call["function"], number)}
    if "arguments" not in call:
        return dict(call)
    given = call["arguments"]
    if wants_text(tokenizer):
        return {**call, "arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}
    if not isinstance(given, str):
        return dict(call)
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        arguments = error
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"message {number}: the arguments of the call of {call.get('name')!r} are the text {given[:60]!r}, no JSON "
            'object: write a mapping, or its JSON, such as {"city": "Rome"}'
        )
    return {**call, "arguments": arguments}


def wants_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template shows arguments right only where they are JSON text."""
    return _wants_text(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=8)
def _wants_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    shown = _probe(tokenizer, _PROBED)
    if shown is not None and not _AS_PYTHON.search(shown):
        return False
    as_text = _probe(tokenizer, json.dumps(_PROBED))
    return as_text is not None and _AS_JSON.search(as_text) is not None


def _probe(tokenizer: PreTrainedTokenizerBase, arguments: object) -> str | None:
    """Return what the template makes of a call with these arguments, alone or answered; None where it refuses both."""
    call = {"id": "call12345", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "name": "probe", "tool_call_id": "call12345"},
    ]
    for messages in (talk[:2], talk):
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template is foreign code: it raises what it likes
            continue
    return None
