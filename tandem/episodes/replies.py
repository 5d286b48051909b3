"""From a sampled turn to what whoever asked for it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tandem.episodes.conversation import turn_text
from tandem.episodes.parsers import FORMATS, Parsed
from tandem.models.tokenizer import decode_text
from tandem.rollout.protocol import SampleOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stopped(tokenizer: PreTrainedTokenizerBase, sample: SampleOutput, stop: Sequence[str]) -> tuple[SampleOutput, str]:
    """Return the sample up to the token with which one of the texts of ``stop`` is there, and which of them; else the
    whole sample and nothing.

    What comes later is as if it had not been drawn: a prefix of a sample is a sample.
    """
    ids = sample.token_ids.tolist()
    whole = decode_text(tokenizer, ids)
    if not any(mark in whole for mark in stop):
        return sample, ""
    for end in range(1, len(ids) + 1):
        text = decode_text(tokenizer, ids[:end])
        if (found := next((mark for mark in stop if mark in text), None)) is not None:
            return _cut(sample, end), found
    return sample, ""


def _cut(sample: SampleOutput, end: int) -> SampleOutput:
    parts = {name: getattr(sample, name)[:end] for name in ("token_ids", "logprobs", "versions")}
    routes = None if sample.routes is None else sample.routes[:end]
    return replace(sample, **parts, routes=routes, finish_reason="stop")


def reply_of(
    tokenizer: PreTrainedTokenizerBase,
    sample: SampleOutput,
    ends: Sequence[int],
    context: Sequence[int],
    *,
    tool_format: str | None = None,
    stop: str = "",
    turn: int = 0,
    details: bool = False,
) -> dict[str, Any]:
    """Return a sampled turn as the fields of an ``Answer``.

    Calls in it are read where it has a ``tool_format`` and was not cut; ``stop`` is what ended it, and no part of its
    text. ``turn`` names its calls. With ``details`` come the ids of the ``context`` that it answers, and log-probs and
    texts of its tokens.
    """
    ids = sample.token_ids.tolist()
    text = turn_text(tokenizer, ids, ends)
    if stop:
        text = text.partition(stop)[0]
    parsed = Parsed(text if tool_format is None else text.strip())
    if tool_format is not None and sample.finish_reason != "length":
        parsed = FORMATS[tool_format](text)
    calls = [
        {"id": f"{turn:04d}{i:05d}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(parsed.calls)
    ]
    report: dict[str, Any] = {"prompt_tokens": len(context), "turn": turn}
    if details:
        texts = [decode_text(tokenizer, [token]) for token in ids]
        report |= {"prompt_ids": list(context), "logprobs": sample.logprobs.tolist(), "texts": texts}
    return {
        "message": {"role": "assistant", "content": parsed.content, **({"tool_calls": calls} if calls else {})},
        "content": parsed.content,
        "calls": calls,
        "errors": list(parsed.errors),
        "token_ids": ids,
        "finish_reason": sample.finish_reason,
        "details": report,
    }
