"""The protocol: from the body of a request to questions. Imports no server.

What can't be had is refused with the name of the field, never left aside: a client that asks for another temperature
would be answered from another distribution than it thinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.base.errors import TandemError
from tandem.episodes.past import arguments

Question = dict[str, Any]
Messages = list[dict[str, Any]]

_TEXTS = Annotated[list[str], Field(max_length=16)]
_NONE: tuple[object, ...] = (None, False, {}, [], 0, 1.0, "auto", "default", "none")
_HARMLESS = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
)
"""Fields that change no token, whatever they say."""


class RefusedError(TandemError):
    """A request that isn't answered; ``field`` is what is wrong in it."""

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class _Asked(BaseModel):
    """What chats and completions have in common."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str = ""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    stop: str | _TEXTS | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    return_token_ids: bool = False

    def options(self, choice: int) -> Question:
        """Return what every question says besides: of several choices each has a seed of its own."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        seed = None if self.seed is None else [self.seed, *([choice] if choice else [])]
        return {"stop": [text for text in stop or () if text], "seed": seed, "max_tokens": self.max_tokens}


class Chat(_Asked):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Literal[0] | None = None

    def question(self, choice: int) -> Question:
        """Return the question for one of the choices."""
        options = self.options(choice)
        options["max_tokens"] = self.max_completion_tokens or self.max_tokens
        tools = [] if self.tool_choice == "none" else self.tools
        details = self.logprobs or self.return_token_ids
        return {"op": "chat", "messages": read_messages(self.messages), "tools": tools, "details": details, **options}


class Completion(_Asked):
    """The body of ``/v1/completions``."""

    prompt: str | list[int]
    echo: Literal[False] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    def question(self, choice: int) -> Question:
        """Return the question for one of the choices."""
        asked = (
            {"op": "complete", "text": self.prompt}
            if isinstance(self.prompt, str)
            else {"op": "generate", "token_ids": self.prompt}
        )
        return {**asked, "details": self.logprobs is not None or self.return_token_ids, **self.options(choice)}


def read(kind: type[Chat] | type[Completion], body: bytes, sampling: Mapping[str, float]) -> Chat | Completion:
    """Return the request in ``body``. Raises ``RefusedError`` for what can't be done; ``sampling`` are the temperature
    and top_p that every answer is drawn with.
    """
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:1])
        raise RefusedError(f"{place or 'the body'}: {first['msg']}", place or None) from None
    for name, value in (asked.model_extra or {}).items():
        if name not in _HARMLESS and value not in _NONE:
            raise RefusedError(f"{name} is not supported: leave it out", name)
    for name, value in sampling.items():
        given = getattr(asked, name)
        if given is not None and given != value:
            raise RefusedError(f"{name} = {given:g}: answers are drawn with {value:g}, so leave it out", name)
    return asked


def read_messages(given: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages as chat templates take them: content as text, arguments as mappings, nothing that says nothing.

    Raises ``RefusedError`` for what is no text.
    """
    found = []
    for place, message in enumerate(given):
        where = f"messages.{place}"
        if not isinstance(message.get("role"), str):
            raise RefusedError(f"{where} has no role", "messages")
        kept = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key) is not None}
        kept["role"] = {"developer": "system"}.get(message["role"], message["role"])
        kept["content"] = _content(message.get("content"), where)
        if calls := message.get("tool_calls"):
            kept["tool_calls"] = [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
        found.append(kept)
    return found


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if None in texts:
        raise RefusedError(f"{where}: the policy reads text alone, so a part that is none can't be given", "messages")
    return "".join(map(str, texts))


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"{where}: a tool call has a function with a name", "messages")
    named = {"name": function["name"], "arguments": arguments(function)}
    return {"id": call.get("id"), "type": "function", "function": named}
