"""The protocol: from answers, whole or in parts, to the bodies of responses. Imports no server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.episodes.address.protocol import Chat, Completion
from tandem.episodes.policy import Answer
from tandem.episodes.text_stream import Part


@dataclass(frozen=True)
class Head:
    """What every response begins with: the ``name`` of the request, the second ``now``, and who answers."""

    name: str
    now: int
    model: str

    def fields(self, asked: Chat | Completion, part: str = "") -> dict[str, Any]:
        """Return it; ``part`` is ``.chunk`` in a stream."""
        kind = f"chat.completion{part}" if isinstance(asked, Chat) else "text_completion"
        return {"id": self.name, "object": kind, "created": self.now, "model": self.model}


@dataclass(frozen=True)
class Reply:
    """The answers to one request as one body."""

    asked: Chat | Completion
    answers: Sequence[Answer]
    head: Head

    def body(self) -> dict[str, Any]:
        """Return the whole response."""
        choices = [self._choice(i, answer) for i, answer in enumerate(self.answers)]
        ids = {"prompt_token_ids": self.answers[0].details["prompt_ids"]} if self.asked.return_token_ids else {}
        return {**self.head.fields(self.asked), "choices": choices, "usage": usage(self.answers), **ids}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": _reason(answer)}
        choice["logprobs"] = _logprobs(self.asked, answer.details)
        if isinstance(self.asked, Chat):
            content = answer.content or (None if answer.calls else "")
            choice["message"] = {"role": "assistant", "content": content, **_calls(answer)}
        else:
            choice["text"] = answer.content
        if self.asked.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice


@dataclass
class _Choice:
    """What of a choice was sent: characters, tokens, and the characters of these tokens."""

    text: int = 0
    tokens: int = 0
    offset: int = 0
    begun: bool = False


@dataclass
class Stream:
    """The answers to one request in parts, as they come; each choice has an end of its own."""

    asked: Chat | Completion
    head: Head
    _sent: dict[int, _Choice] = field(default_factory=dict)
    _answers: list[Answer] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether every choice has been answered."""
        return len(self._answers) == self.asked.n

    def chunks(self, index: int, what: Part | Answer) -> list[dict[str, Any]]:
        """Return what is sent for a part of a choice, or for its answer: what no part had, and its end."""
        if not isinstance(what, Answer):
            return [self._chunk(index, self._said(index, what))]
        self._answers.append(what)
        sent, details = self._sent.setdefault(index, _Choice()), what.details
        left: Part = {"text": what.content[sent.text :], "token_ids": what.token_ids[sent.tokens :]}
        left |= {name: details[name][sent.tokens :] for name in ("logprobs", "texts") if name in details}
        said = self._said(index, left)
        if isinstance(self.asked, Chat):
            said["delta"] |= _calls(what, numbered=True)
        nothing: dict[str, Any] = {"delta": {}} if isinstance(self.asked, Chat) else {"text": ""}
        ids = {"prompt_token_ids": details["prompt_ids"]} if self.asked.return_token_ids else {}
        found = [self._chunk(index, said), self._chunk(index, {**nothing, "finish_reason": _reason(what)}) | ids]
        if self.ended and (self.asked.stream_options or {}).get("include_usage"):
            head = self.head.fields(self.asked, ".chunk")
            found.append({**head, "choices": [], "usage": usage(self._answers)})
        return found

    def _chunk(self, index: int, said: Mapping[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": None, **said}
        return {**self.head.fields(self.asked, ".chunk"), "choices": [choice]}

    def _said(self, index: int, part: Part) -> dict[str, Any]:
        """Return a part as the fields of a choice."""
        sent, text = self._sent.setdefault(index, _Choice()), part["text"]
        said: dict[str, Any] = {"logprobs": _logprobs(self.asked, part, sent.offset)}
        if isinstance(self.asked, Chat):
            role = {} if sent.begun else {"role": "assistant"}
            said["delta"] = {**role, **({"content": text} if text or not sent.begun else {})}
        else:
            said["text"] = text
        ids = part.get("token_ids", [])
        if self.asked.return_token_ids:
            said["token_ids"] = ids
        sent.text, sent.tokens, sent.begun = sent.text + len(text), sent.tokens + len(ids), True
        sent.offset += sum(map(len, part.get("texts", ())))
        return said


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Count tokens of the prompt and of all answers to it."""
    made, given = sum(len(answer.token_ids) for answer in answers), answers[0].details["prompt_tokens"]
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else answer.finish_reason


def _calls(answer: Answer, *, numbered: bool = False) -> dict[str, Any]:
    """Return the field of the calls, where there are some."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        | ({"index": i} if numbered else {})
        for i, call in enumerate(answer.calls)
    ]
    return {"tool_calls": calls} if calls else {}


def _logprobs(asked: Chat | Completion, given: Mapping[str, Any], offset: int = 0) -> dict[str, Any] | None:
    """Return log-probs and texts of tokens; ``offset``: characters of those before them."""
    if asked.logprobs in (None, False):
        return None
    texts, logprobs = given["texts"], given["logprobs"]
    if isinstance(asked, Chat):
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
    offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
    return {"tokens": texts, "token_logprobs": logprobs, "text_offset": offsets, "top_logprobs": None}
