"""Several rollout engines as one, for whoever just wants answers."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tandem.base.errors import ContractError, EngineDiedError
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, Sampling

if TYPE_CHECKING:
    import torch


_END = object()
_ASK_AGAIN_S = 0.01  # between questions to a source that had nothing


@dataclass(frozen=True)
class _Ended:
    """One engine has no more answers; ``error`` is what ended it, if anything did."""

    name: str
    error: BaseException | None


class _Share:
    """The requests of one engine, which pulls them in a thread of its own.

    ``owed`` are those without an answer; ``unanswered`` counts those in the engine, in its thread.
    """

    def __init__(self) -> None:
        self.owed: dict[int | str, GroupRequest] = {}
        self.unanswered = 0
        self._waiting: queue.SimpleQueue[GroupRequest | None] = queue.SimpleQueue()

    def ask(self, request: GroupRequest | None) -> None:
        """Have the engine asked this; None: there is nothing more to ask."""
        if request is not None:
            self.owed[request.key] = request
        self._waiting.put(request)

    def requests(self) -> Iterator[GroupRequest | None]:
        """Return what the engine pulls; it waits only while the engine has nothing."""
        while True:
            try:
                request = self._waiting.get(block=self.unanswered == 0)
            except queue.Empty:
                yield None
                continue
            if request is None:
                return
            self.unanswered += 1
            yield request


class _Sharded:
    """Requests dealt to ``engines``, each of which generates in a thread of its own."""

    def __init__(self, engines: dict[str, RolloutEngine], sampling: Sampling) -> None:
        self._news: queue.SimpleQueue[GroupOutput | _Ended] = queue.SimpleQueue()
        self._shares = {name: _Share() for name in engines}
        self._turns = itertools.count()
        for name, engine in engines.items():
            run = partial(self._answer, name, engine, self._shares[name], sampling)
            threading.Thread(target=run, name=f"answers-of-{name}", daemon=True).start()

    @property
    def owed(self) -> int:
        """Requests that have no answer."""
        return sum(len(share.owed) for share in self._shares.values())

    def ask(self, request: GroupRequest) -> None:
        """Give the request to the engine whose turn it is."""
        if not self._shares:
            raise ContractError("there are requests and no rollout engine to answer them")
        names = list(self._shares)
        self._shares[names[next(self._turns) % len(names)]].ask(request)

    def next_output(self, seconds: float | None) -> GroupOutput | None:
        """Return the next group that an engine has finished; None where none has for so long. Raises what ended an
        engine.
        """
        try:
            found = self._news.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, GroupOutput):
            for share in self._shares.values():
                share.owed.pop(found.request.key, None)
            return found
        share = self._shares.pop(found.name)
        if found.error is not None and (not isinstance(found.error, EngineDiedError) or not self._shares):
            raise found.error
        for request in share.owed.values():
            self.ask(request)
        return None

    def end(self) -> None:
        """Ask nothing more: the threads end with what they have."""
        for share in self._shares.values():
            share.ask(None)

    def _answer(self, name: str, engine: RolloutEngine, share: _Share, sampling: Sampling) -> None:
        try:
            for output in engine.generate(share.requests(), sampling):
                share.unanswered -= 1
                self._news.put(output)
        except BaseException as error:  # raised to whoever asked
            self._news.put(_Ended(name, error))
        else:
            self._news.put(_Ended(name, None))


class EnginePool:
    """A ``RolloutEngine`` over ``engines`` (by name), which may come and go between two calls."""

    def __init__(self, engines: dict[str, RolloutEngine]) -> None:
        self.engines = engines

    @property
    def version(self) -> int:
        return min(engine.version for engine in self.engines.values())

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        """Deal the requests to the engines in turns, as they come; groups come as they finish.

        What an engine that dies owed is asked of the others; ``EngineDiedError`` once there is none.
        """
        source, more = iter(requests), True
        sharded = _Sharded(dict(self.engines), sampling)
        try:
            while True:
                while more:
                    request = next(source, _END)
                    if request is None:
                        break
                    if isinstance(request, GroupRequest):
                        sharded.ask(request)
                    else:
                        more = False
                if not more and not sharded.owed:
                    return
                output = sharded.next_output(_ASK_AGAIN_S if more else None)
                if output is not None:
                    yield output
        finally:
            sharded.end()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        """Load every engine, one after the other; all must answer the same fingerprint."""
        pairs = None if weights is None else list(weights)
        answers = {engine.load(pairs, version) for engine in self.engines.values()}
        if len(answers) != 1:
            raise ContractError(f"engines answered weights version {version} with the fingerprints {answers}")
        return answers.pop()

    def pause(self, abort: bool = False) -> None:
        for engine in self.engines.values():
            engine.pause(abort)

    def resume(self) -> None:
        for engine in self.engines.values():
            engine.resume()

    def sleep(self) -> None:
        """Put every engine to sleep. One that has died needs none: whoever watches over it finds that out."""
        for engine in self.engines.values():
            with suppress(EngineDiedError):
                engine.sleep()

    def wake(self) -> None:
        """Wake every engine but those that have died."""
        for engine in self.engines.values():
            with suppress(EngineDiedError):
                engine.wake()
