"""How the group of a ticket comes about, beside the loops that drive an engine: by one request, or by episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.columns.proto import DataProto
from tandem.data.prompts import Prompt
from tandem.reward.outcome import Verdict
from tandem.roles.rollout.generation import as_batch, request
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, Sampling
from tandem.rollout.sound import sound_outputs

_TICK_S = 0.05  # between looks at what goes on outside while the engine has nothing to do


@dataclass(frozen=True)
class Beginning:
    """What a group is made from. ``key`` names it, ``group_id`` is its place; random streams depend on ``origin``."""

    key: str
    prompt: Prompt
    group_id: int
    origin: tuple[int | str, ...]


@dataclass(frozen=True)
class Made:
    """A generated group: the columns of its samples, and ``verdicts`` on those that need no scorer (None: they do)."""

    key: str
    batch: DataProto
    verdicts: tuple[Verdict | None, ...] = ()


class Making(Protocol):
    """The groups that one loop has begun: ``SingleAnswers``, or ``EpisodeGroups`` of several turns. For one thread.

    ``sampling`` is that of its requests, which is not always that of a whole group. ``make_groups`` drives it::

        making.begin(beginning)
        while (request := making.next()) is not None:
            making.hear(answer(request))
        made = making.finished()
    """

    @property
    def sampling(self) -> Sampling:
        """How the samples of every request are drawn."""

    @property
    def awaits(self) -> bool:
        """Whether a request may still come of what has begun, though none is there and none unanswered."""

    def begin(self, beginning: Beginning) -> None:
        """Begin a group: its first requests come out of ``next``."""

    def next(self) -> GroupRequest | None:
        """Return what the engine is to be asked now; None where nothing is ready."""

    def hear(self, output: GroupOutput) -> None:
        """Take the engine's answer to one of the requests."""

    def finished(self) -> list[Made]:
        """Return the groups that are whole since the last call."""

    def wait(self, seconds: float) -> None:
        """Wait for something outside to happen, at most so long."""

    def abandon(self) -> None:
        """Forget the groups that are not whole."""

    def activity(self) -> str:
        """Say what is waited for outside; empty for nothing."""


MakeGroups = Callable[[Sampling, Any], Making]
"""From the sampling of a group and the tokenizer to what makes groups."""


class SingleAnswers:
    """Groups of plain answers: one request each. See ``Making``."""

    awaits = False

    def __init__(self, sampling: Sampling, tokenizer: Any) -> None:
        self.sampling = sampling
        self._tokenizer = tokenizer
        self._ready: deque[GroupRequest] = deque()
        self._begun: dict[int | str, Beginning] = {}
        self._made: list[Made] = []

    def begin(self, beginning: Beginning) -> None:
        """Put the one request of the group in the queue."""
        key = beginning.key
        self._begun[key] = beginning
        self._ready.append(request(key, beginning.prompt, self.sampling.samples, *beginning.origin))

    def next(self) -> GroupRequest | None:
        """Return the request that waits the longest."""
        return self._ready.popleft() if self._ready else None

    def hear(self, output: GroupOutput) -> None:
        """Turn the answers into the columns of a finished group."""
        begun = self._begun.pop(output.request.key)
        self._made.append(Made(begun.key, as_batch(begun.prompt, output, begun.group_id, self._tokenizer)))

    def finished(self) -> list[Made]:
        """Return the groups answered since the last call."""
        made, self._made = self._made, []
        return made

    def wait(self, seconds: float) -> None:
        """Return at once, for nothing goes on outside."""

    def abandon(self) -> None:
        """Forget what was begun, its requests included."""
        self._ready.clear()
        self._begun.clear()

    def activity(self) -> str:
        """Say nothing: only the engine is waited for."""
        return ""


def make_groups(engine: RolloutEngine, making: Making, begin: Callable[[], bool]) -> Iterator[Made]:
    """Yield groups as they are made, in any order, until ``begin``, which begins one more, says that there is none."""
    unanswered = 0

    def requests() -> Iterator[GroupRequest | None]:
        nonlocal unanswered
        while True:
            request = making.next()
            if request is not None:
                unanswered += 1
                yield request
            elif begin():
                continue
            elif not making.awaits:
                return
            elif unanswered:
                yield None
            else:
                making.wait(_TICK_S)

    try:
        for output in sound_outputs(engine, requests(), making.sampling):
            unanswered -= 1
            making.hear(output)
            yield from making.finished()
        yield from making.finished()
    finally:
        making.abandon()
