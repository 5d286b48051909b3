"""Groups of episodes: what each asks becomes a request, what is sampled goes back to it, its end makes a sample."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from tandem.base.errors import DataError, TandemError
from tandem.base.seeding import derive_seed
from tandem.episodes.policy import Task
from tandem.episodes.process.pool import Asks, EpisodePool, Event, Restarted
from tandem.episodes.replies import stopped
from tandem.episodes.text_stream import Part, TextStream
from tandem.roles.rollout.episode_rows import Group, Play, as_made
from tandem.roles.rollout.making import Beginning, Made
from tandem.roles.rollout.talk import EpisodeRules, Over, Talk
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling


@dataclass(frozen=True)
class _Question:
    """What an episode has asked, in which branch of it, and when."""

    asks: Asks
    branch: int
    at: float


class EpisodeGroups:
    """Groups of ``sampling.n`` episodes each. See ``Making``.

    ``sampling.max_tokens`` bounds all that follows the first prompt of an episode. A turn's random stream depends on
    the group's origin, the prompt, the episode's index, and the numbers of the turn and of its branch. ``clock`` gives
    seconds.
    """

    def __init__(
        self,
        pool: EpisodePool,
        rules: EpisodeRules,
        sampling: Sampling,
        tokenizer: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.sampling = replace(sampling, n=1)
        self._n = sampling.n
        self._pool, self._rules, self._tokenizer = pool, rules, tokenizer
        self._ends = sampling.stop_token_ids
        self._prefix = pool.number()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._plays: dict[str, Play] = {}  # under way
        self._ready: deque[GroupRequest] = deque()
        self._asked: dict[str, _Question] = {}  # by the key of the request that was made of it
        self._made: list[Made] = []

    @property
    def awaits(self) -> bool:
        """Whether an episode is under way."""
        return bool(self._plays)

    def begin(self, beginning: Beginning) -> None:
        """Begin the ``n`` episodes of a group, in the processes of the pool."""
        prompt, group = beginning.prompt, Group(beginning)
        for index in range(self._n):
            play = Play(group, index)
            group.plays.append(play)
            name = f"{self._prefix} {beginning.key} [{index}]"
            self._plays[name] = play
            task = Task(
                prompt.uid,
                prompt.text,
                list(prompt.prompt_ids),
                None if prompt.messages is None else list(prompt.messages),
                prompt.ground_truth,
                prompt.data_source,
                prompt.extra_info,
                derive_seed(*beginning.origin, prompt.uid, index, "episode"),
            )
            self._pool.begin(name, task, self._events)

    def next(self) -> GroupRequest | None:
        """Return the next turn that an episode asks for. Raises ``TandemError`` where none can be played any more."""
        self._take_events()
        if self._ready:
            return self._ready.popleft()
        self._pool.check()
        return None

    def hear(self, output: GroupOutput) -> None:
        """Give a sampled turn to the episode that asked for it, if it still does."""
        asked = self._asked.pop(str(output.request.key), None)
        play = None if asked is None else self._plays.get(asked.asks.id)
        if asked is None or play is None:
            return
        question, talk = asked.asks.question, play.talks[asked.branch]
        sample, stop = stopped(self._tokenizer, output.samples[0], question.get("stop") or ())
        play.engine_seconds += self._clock() - asked.at
        if sample.finish_reason == "length" and len(sample.token_ids) != question.get("max_tokens"):
            talk.cut = "tokens"
        talk.open = False
        reply = talk.hear(question, sample, output.prompt_routes, stop, self._rules, self._tokenizer, self._ends)
        reply["details"]["branch"] = asked.branch
        self._pool.answer(asked.asks.id, asked.asks.number, reply)

    def finished(self) -> list[Made]:
        """Return the groups all of whose episodes have ended since the last call."""
        self._take_events()
        made, self._made = self._made, []
        return made

    def wait(self, seconds: float) -> None:
        """Wait for a question or an end."""
        with suppress(queue.Empty):
            self._take(self._events.get(timeout=seconds))

    def abandon(self) -> None:
        """End the episodes that are under way."""
        names, self._plays = list(self._plays), {}
        self._asked.clear()
        self._ready.clear()
        with suppress(TandemError):  # a pool that is broken has ended them
            for name in names:
                self._pool.cancel(name)

    def activity(self) -> str:
        """Say what the processes of the episodes do, where one is under way."""
        return self._pool.activity() if self._plays else ""

    # --- events ------------------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        while not self._events.empty():
            self._take(self._events.get())

    def _take(self, event: Event) -> None:
        play = self._plays.get(event.id)
        if play is None:  # abandoned
            return
        if isinstance(event, Asks):
            self._take_question(play, event)
            return
        self._asked = {key: asked for key, asked in self._asked.items() if asked.asks.id != event.id}
        if isinstance(event, Restarted):
            play.begin_anew()
            return
        del self._plays[event.id]
        play.ended = event
        if all(other.ended is not None for other in play.group.plays):
            self._made.append(as_made(play.group, self._rules, self._tokenizer, self.sampling.routes))

    def _take_question(self, play: Play, asks: Asks) -> None:
        """Make a request of a question, or answer at once why there is none."""
        try:
            number = self._branch(play, asks)
            self._ready.append(self._request(play, number, asks))
        except Over as over:
            play.talks[number].cut = str(over)
            self._pool.answer(asks.id, asks.number, {"over": str(over)})
        except DataError as error:
            self._pool.answer(asks.id, asks.number, {"error": str(error)})

    def _branch(self, play: Play, asks: Asks) -> int:
        """Return the number of the branch that a question belongs to. Raises ``DataError`` where there is none for it.

        Without a number it goes to the branch of those numbered here whose words it begins with, else to a new one
        where something was under way when it was asked, else to the first.
        """
        most, given = self._rules.branches, asks.question.get("branch")
        is_open = {number for number, talk in play.talks.items() if talk.open}
        if given is not None:
            if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < most:
                raise DataError(f"there is no branch {given!r}: rollout.episode.branches is {most}, counted from 0")
            if given in is_open:
                raise DataError(f"branch {given} is asked one thing at a time: await the answer first")
            return given
        closed = {0, *play.own} & set(play.talks) - is_open
        known = {number: play.talks[number].goes_on(asks.question) for number in closed}
        if any(known.values()) and (play.own or asks.question.get("beside")):
            return max(known, key=lambda number: (known[number], -number))
        if not asks.question.get("beside"):
            return 0
        free = [number for number in range(most) if number not in play.talks]
        if not free:
            raise DataError(
                "an episode asks the policy one thing at a time: await the answer first, or write "
                f"rollout.episode.branches, which is {most}, and give what is asked at once a branch each"
            )
        play.own.add(free[0])
        return free[0]

    def _request(self, play: Play, number: int, asks: Asks) -> GroupRequest:
        """Return the next turn of a branch. Raises ``Over`` beyond a limit, ``DataError`` for what can't be asked."""
        question, begun = asks.question, play.group.begun
        talk = play.talks.setdefault(number, Talk(beside=number > 0))
        turn, share = talk.turns, self.sampling.max_tokens // self._rules.branches
        most = talk.ask(question, begun.prompt, self._rules, self._tokenizer, self._ends, share)
        talk.open = True
        key = f"{asks.id} question {asks.number}"
        self._asked[key] = _Question(asks, number, self._clock())
        beside = ("branch", number) if number else ()
        later = ("turn", turn) if turn or number else ()
        own = () if question.get("seed") is None else ("seed", *question["seed"])
        seed = derive_seed(*begun.origin, begun.prompt.uid, play.index, *beside, *later, *own)
        assert talk.trajectory is not None
        context = torch.tensor(talk.trajectory.context, dtype=torch.int64)
        return GroupRequest(key, context, (seed,), max_tokens=most, watch=self._text_stream(talk, asks))

    def _text_stream(self, talk: Talk, asks: Asks) -> TextStream | None:
        """Return what tells the episode of its turn on the way, where it wants to hear."""
        if not asks.question.get("stream") or not self._rules.streams:
            return None
        stop, details = asks.question.get("stop") or (), bool(asks.question.get("details"))

        def hear(part: Part) -> None:
            with suppress(TandemError):  # a pool that is broken says so elsewhere
                self._pool.send_part(asks.id, asks.number, part)

        written = talk.tool_format(self._rules)
        return TextStream(self._tokenizer, self._ends, hear, tool_format=written, stop=stop, details=details)
