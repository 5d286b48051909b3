"""Questions to a finished model, answered by an engine in a thread of its own, many at a time."""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from tandem.base.errors import DataError, TandemError
from tandem.base.seeding import derive_seed
from tandem.data.chat import encode_chat_prompt
from tandem.episodes.past import check_ids, check_offer
from tandem.episodes.policy import Answer
from tandem.episodes.replies import reply_of, stopped
from tandem.episodes.text_stream import Hear, Part, TextStream
from tandem.models.tokenizer import encode_plain
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, Sampling


@dataclass(frozen=True)
class _Asked:
    """A question under way, and who waits for its answer in which loop."""

    question: Mapping[str, Any]
    ids: list[int]
    waiting: asyncio.Future[Answer]
    loop: asyncio.AbstractEventLoop

    def settle(self, result: Answer | Exception) -> None:
        """Hand over the answer, or why there is none."""
        with suppress(RuntimeError):  # nobody waits in a loop that is closed
            self.loop.call_soon_threadsafe(self._set, result)

    def _set(self, result: Answer | Exception) -> None:
        if self.waiting.done():
            return
        if isinstance(result, Exception):
            self.waiting.set_exception(result)
        else:
            self.waiting.set_result(result)


class _Closed(Exception):
    """Nobody is to be answered any more."""


class Desk:
    """Answers questions as an episode's policy does, each for itself. ``context`` bounds a prompt and its answer."""

    def __init__(
        self, engine: RolloutEngine, sampling: Sampling, tokenizer: Any, *, tool_format: str | None, context: int
    ) -> None:
        self._engine, self._sampling, self._tokenizer = engine, sampling, tokenizer
        self._tool_format, self._context = tool_format, context
        self._new: queue.SimpleQueue[tuple[GroupRequest, _Asked] | None] = queue.SimpleQueue()
        self._under_way: dict[int | str, _Asked] = {}
        self._ended: str | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-desk", daemon=True)
        self._thread.start()

    async def ask(self, question: Mapping[str, Any], hear: Hear | None = None) -> Answer:
        """Return the answer; ``hear`` is given parts of it before, as they are drawn.

        Raises ``TandemError`` for what can't be asked, or once the engine has ended.
        """
        ids = self._prompt(question)
        most = min(self._sampling.max_tokens, self._context - len(ids))
        if most < 1:
            raise DataError(f"the prompt has {len(ids)} tokens, and with its answer it may have {self._context}")
        self._require_engine()
        given = question.get("seed")
        seed = secrets.randbits(63) if given is None else derive_seed(*given)
        loop = asyncio.get_running_loop()
        asked = _Asked(question, ids, loop.create_future(), loop)
        most = min(most, question.get("max_tokens") or most)
        watch = None if hear is None else self._text_stream(asked, hear)
        prompt = torch.tensor(ids, dtype=torch.int64)
        request = GroupRequest(secrets.token_hex(8), prompt, (seed,), max_tokens=most, watch=watch)
        self._new.put((request, asked))
        self._require_engine()  # it may have ended meanwhile
        return await asked.waiting

    def close(self) -> None:
        """End; who waits for an answer is told."""
        self._new.put(None)
        self._thread.join()

    def _require_engine(self) -> None:
        if self._ended is not None:
            raise TandemError(f"the engine has ended: {self._ended}")

    def _prompt(self, question: Mapping[str, Any]) -> list[int]:
        match question["op"]:
            case "chat":
                check_offer(self._tokenizer, question["tools"] or [], self._tool_format)
                return encode_chat_prompt(self._tokenizer, question["messages"], tools=question["tools"] or None)[1]
            case "complete":
                return encode_plain(self._tokenizer, question["text"])
            case _:
                ids: list[int] = question["token_ids"]
                check_ids(self._tokenizer, ids)
                return ids

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for output in self._engine.generate(self._requests(), self._sampling):
                asked = self._under_way.pop(output.request.key)
                asked.settle(self._answer(asked, output))
        except _Closed:
            self._ended = "it was closed"
        except Exception as error:
            self._ended = f"{type(error).__name__}: {error}"
        left = list(self._under_way.values())
        with suppress(queue.Empty):
            while True:
                left += [asked for _, asked in filter(None, [self._new.get_nowait()])]
        for asked in left:
            asked.settle(TandemError(f"the engine has ended: {self._ended}"))

    def _requests(self) -> Iterator[GroupRequest | None]:
        """Yield what is asked; wait for it only while nothing is under way."""
        while True:
            try:
                found = self._new.get(block=not self._under_way)
            except queue.Empty:
                yield None
                continue
            if found is None:
                raise _Closed
            request, asked = found
            self._under_way[request.key] = asked
            yield request

    def _text_stream(self, asked: _Asked, hear: Hear) -> TextStream:
        """Return what tells the asking loop of an answer on the way."""
        question = asked.question

        def handed(part: Part) -> None:
            with suppress(RuntimeError):  # nobody waits in a loop that is closed
                asked.loop.call_soon_threadsafe(hear, part)

        return TextStream(
            self._tokenizer,
            self._sampling.stop_token_ids,
            handed,
            tool_format=self._format_in(question),
            stop=question.get("stop") or (),
            details=bool(question.get("details")),
        )

    def _format_in(self, question: Mapping[str, Any]) -> str | None:
        """Return how calls in the answer are written, where it may have some."""
        return self._tool_format if question["op"] == "chat" and question["tools"] else None

    def _answer(self, asked: _Asked, output: GroupOutput) -> Answer:
        question = asked.question
        sample, stop = stopped(self._tokenizer, output.samples[0], question.get("stop") or ())
        reply = reply_of(
            self._tokenizer,
            sample,
            self._sampling.stop_token_ids,
            asked.ids,
            tool_format=self._format_in(question),
            stop=stop,
            details=bool(question.get("details")),
        )
        return Answer(**reply)
