"""Several rollout engines as one, for whoever just wants answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.base.errors import ContractError, EngineDiedError
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, Sampling

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Ended:
    """One engine has no more answers; ``error`` is what ended it, if anything did."""

    name: str
    error: BaseException | None


class EnginePool:
    """A ``RolloutEngine`` over ``engines`` (by name), which may come and go between two calls."""

    def __init__(self, engines: dict[str, RolloutEngine]) -> None:
        self.engines = engines

    @property
    def version(self) -> int:
        return min(engine.version for engine in self.engines.values())

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        """Deal the requests to the engines in turns, all at the start; groups come as they finish.

        What an engine that dies owed is asked of the others; ``EngineDiedError`` once there is none.
        """
        owed = {request.key: request for request in requests if request is not None}
        alive = dict(self.engines)
        while owed:
            if not alive:
                raise ContractError(f"{len(owed)} requests and no rollout engine to answer them")
            for output in self._round(list(owed.values()), sampling, alive):
                del owed[output.request.key]
                yield output

    def _round(
        self, requests: list[GroupRequest], sampling: Sampling, alive: dict[str, RolloutEngine]
    ) -> Iterator[GroupOutput]:
        """Yield the answers of all; takes those that die out of ``alive``."""
        news: queue.SimpleQueue[GroupOutput | _Ended] = queue.SimpleQueue()

        def answer(name: str, engine: RolloutEngine, share: list[GroupRequest]) -> None:
            try:
                for output in engine.generate(share, sampling):
                    news.put(output)
            except BaseException as error:  # raised to whoever asked
                news.put(_Ended(name, error))
            else:
                news.put(_Ended(name, None))

        under_way = list(alive)
        for i, (name, engine) in enumerate(alive.items()):
            share = requests[i :: len(under_way)]
            threading.Thread(target=answer, args=(name, engine, share), name=f"answers-of-{name}", daemon=True).start()
        while under_way:
            found = news.get()
            if isinstance(found, GroupOutput):
                yield found
                continue
            under_way.remove(found.name)
            if found.error is not None:
                if not isinstance(found.error, EngineDiedError) or len(alive) == 1:
                    raise found.error
                del alive[found.name]

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
