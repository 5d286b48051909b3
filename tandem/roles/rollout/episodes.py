"""Groups of episodes: what each asks becomes a request, what is sampled goes back to it, its end makes a sample."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tandem.base.errors import DataError, TandemError
from tandem.base.seeding import derive_seed
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.data.chat import Message, encode_chat_prompt
from tandem.data.tools import Tools
from tandem.episodes.conversation import checked_new
from tandem.episodes.past import Added, Past, after_ids, after_messages, after_text, check_ids, check_offer
from tandem.episodes.policy import Task
from tandem.episodes.process.pool import Asks, Ended, EpisodePool, Event, Restarted
from tandem.episodes.replies import reply_of, stopped
from tandem.episodes.text_stream import Part, TextStream
from tandem.episodes.trajectory import Trajectory
from tandem.reward.outcome import Outcome, Verdict, failed
from tandem.roles.rollout.making import Beginning, Made
from tandem.rollout.protocol import GroupOutput, GroupRequest, SampleOutput, Sampling


class _Over(Exception):
    """A limit is reached; its text is which one."""


@dataclass(frozen=True)
class EpisodeRules:
    """What holds for all episodes: at most ``max_turns`` with ``max_sampled`` tokens, ``max_prompt`` before the first.

    ``tools`` are on offer, and calls of them are written as ``tool_format`` says. ``past``: see there.
    ``turn_rewards``: groups have the column ``token_rewards``. ``streams``: a turn may be told while it is drawn,
    since no new weights make it begin anew.
    """

    max_turns: int
    max_prompt: int
    tools: Tools | None
    tool_format: str | None
    past: Past = "fixed"
    turn_rewards: bool = False
    streams: bool = True
    max_sampled: int | None = None


@dataclass
class _Play:
    """One episode as the driver knows it. ``messages`` None: nothing was said yet, or it talks in tokens."""

    group: _Group
    index: int
    trajectory: Trajectory | None = None
    messages: list[Message] | None = None
    tools: Tools | None = None
    cut: str = ""
    rewritten: int = 0
    asked_at: float = 0.0
    engine_seconds: float = 0.0
    ended: Ended | None = None


@dataclass
class _Group:
    begun: Beginning
    plays: list[_Play] = field(default_factory=list)


class EpisodeGroups:
    """Groups of ``sampling.n`` episodes each. See ``Making``.

    ``sampling.max_tokens`` bounds all that follows the first prompt of an episode. A turn's random stream depends on
    the group's origin, the prompt, the episode's index and the number of the turn. ``clock`` gives seconds.
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
        self._plays: dict[str, _Play] = {}  # under way
        self._ready: deque[GroupRequest] = deque()
        self._asked: dict[str, Asks] = {}  # by the key of the request that was made of it
        self._made: list[Made] = []

    @property
    def awaits(self) -> bool:
        """Whether an episode is under way."""
        return bool(self._plays)

    def begin(self, beginning: Beginning) -> None:
        """Begin the ``n`` episodes of a group, in the processes of the pool."""
        prompt, group = beginning.prompt, _Group(beginning)
        for index in range(self._n):
            play = _Play(group, index)
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
        asks = self._asked.pop(str(output.request.key), None)
        play = None if asks is None else self._plays.get(asks.id)
        if asks is None or play is None or play.trajectory is None:
            return
        sample, stop = stopped(self._tokenizer, output.samples[0], asks.question.get("stop") or ())
        context = play.trajectory.context
        play.engine_seconds += self._clock() - play.asked_at
        play.trajectory.sample(sample, output.prompt_routes)
        self._pool.answer(asks.id, asks.number, self._reply(play, asks.question, sample, stop, context))

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
        self._asked = {key: asks for key, asks in self._asked.items() if asks.id != event.id}
        if isinstance(event, Restarted):
            play.trajectory, play.messages, play.tools, play.cut, play.rewritten = None, None, None, "", 0
            play.engine_seconds = 0.0
            return
        del self._plays[event.id]
        play.ended = event
        if all(other.ended is not None for other in play.group.plays):
            self._made.append(self._as_made(play.group))

    def _take_question(self, play: _Play, asks: Asks) -> None:
        """Make a request of a question, or answer at once why there is none."""
        try:
            self._ready.append(self._request(play, asks))
        except _Over as over:
            play.cut = str(over)
            self._pool.answer(asks.id, asks.number, {"over": play.cut})
        except DataError as error:
            self._pool.answer(asks.id, asks.number, {"error": str(error)})

    def _request(self, play: _Play, asks: Asks) -> GroupRequest:
        """Return the next turn. Raises ``_Over`` beyond a limit, ``DataError`` for what can't be asked."""
        question, origin = asks.question, (*play.group.begun.origin, play.group.begun.prompt.uid, play.index)
        trajectory = play.trajectory
        turn = 0 if trajectory is None else len(trajectory.turns)
        talk = play.messages is not None or trajectory is None
        if (question["op"] == "chat") != talk and turn and self._rules.past == "fixed":
            raise DataError("an episode talks in messages or in tokens, and not in both: keep to chat(), or generate()")
        added = self._chat(play, question) if question["op"] == "chat" else self._generate(play, question)
        if turn == self._rules.max_turns:
            raise _Over("turns")
        if trajectory is None and len(added.ids) > self._rules.max_prompt:
            most = self._rules.max_prompt
            raise DataError(f"it begins with {len(added.ids)} tokens, more than data.max_prompt_length = {most}")
        left = self.sampling.max_tokens - (0 if trajectory is None else len(trajectory.ids) + len(added.ids))
        if self._rules.max_sampled is not None:
            left = min(left, self._rules.max_sampled - (0 if trajectory is None else sum(trajectory.turns)))
        if left < 1:
            raise _Over("tokens")
        if trajectory is None:
            trajectory = play.trajectory = Trajectory(list(added.ids))
        else:
            trajectory.insert(added.ids, anew=added.anew)
            play.rewritten += added.anew
        key = f"{asks.id} question {asks.number}"
        self._asked[key], play.asked_at = asks, self._clock()
        own = () if question.get("seed") is None else ("seed", *question["seed"])
        seed = derive_seed(*origin, *own) if turn == 0 else derive_seed(*origin, "turn", turn, *own)
        context = torch.tensor(trajectory.context, dtype=torch.int64)
        most, watch = min(left, question.get("max_tokens") or left), self._text_stream(play, asks)
        return GroupRequest(key, context, (seed,), max_tokens=most, watch=watch)

    def _text_stream(self, play: _Play, asks: Asks) -> TextStream | None:
        """Return what tells the episode of its turn on the way, where it wants to hear."""
        if not asks.question.get("stream") or not self._rules.streams:
            return None
        stop, details = asks.question.get("stop") or (), bool(asks.question.get("details"))

        def hear(part: Part) -> None:
            with suppress(TandemError):  # a pool that is broken says so elsewhere
                self._pool.send_part(asks.id, asks.number, part)

        written = self._tool_format(play)
        return TextStream(self._tokenizer, self._ends, hear, tool_format=written, stop=stop, details=details)

    def _tool_format(self, play: _Play) -> str | None:
        """Return how calls in the next turn are written, where it may have some."""
        return self._rules.tool_format if play.messages is not None and play.tools else None

    def _chat(self, play: _Play, question: Mapping[str, Any]) -> Added:
        """Return what messages add, and take them as what is said; at first they are the prompt."""
        given, prompt = question["messages"], play.group.begun.prompt
        tools = self._rules.tools
        if question["tools"] is not None:
            tools = question["tools"]
            check_offer(self._tokenizer, tools, self._rules.tool_format)
        if play.trajectory is None:
            messages = checked_new([], given)
            if question["tools"] is None and prompt.messages is not None and messages == list(prompt.messages):
                added = Added(list(prompt.prompt_ids))
            else:
                added = Added(encode_chat_prompt(self._tokenizer, messages, tools=tools)[1])
            play.tools = tools
        else:
            past = self._rules.past
            if past != "fixed" and tools != play.tools:  # what is offered stands before all else
                play.tools, play.messages = tools, None
            context = play.trajectory.context
            added = after_messages(
                self._tokenizer, context, play.messages, given, ends=self._ends, tools=play.tools, past=past
            )
        play.messages = list(given)
        return added

    def _generate(self, play: _Play, question: Mapping[str, Any]) -> Added:
        """Return what tokens or a text add."""
        context = [] if play.trajectory is None else play.trajectory.context
        play.messages = None
        if question["op"] == "complete":
            return after_text(self._tokenizer, context, question["text"], past=self._rules.past)
        ids: list[int] = question["token_ids"]
        check_ids(self._tokenizer, ids)
        return after_ids(context, ids, past=self._rules.past)

    def _reply(
        self, play: _Play, question: Mapping[str, Any], sample: SampleOutput, stop: str, context: list[int]
    ) -> dict[str, Any]:
        """Return a sampled turn as the episode sees it; a chat goes on with its message."""
        assert play.trajectory is not None
        if sample.finish_reason == "length" and len(sample.token_ids) != question.get("max_tokens"):
            play.cut = "tokens"
        reply = reply_of(
            self._tokenizer,
            sample,
            self._ends,
            context,
            tool_format=self._tool_format(play),
            stop=stop,
            turn=len(play.trajectory.turns),
            details=bool(question.get("details")),
        )
        if play.messages is not None:
            play.messages.append(reply["message"])
        return reply

    # --- groups ------------------------------------------------------------------------------------------------------

    def _as_made(self, group: _Group) -> Made:
        """Return a whole group as columns, with the verdicts that its episodes brought."""
        begun, count = group.begun, self._n
        prompt = begun.prompt
        paths = [
            Trajectory(list(prompt.prompt_ids)) if play.trajectory is None else play.trajectory.until_sampled()
            for play in group.plays
        ]
        verdicts = [_verdict(play, path) for play, path in zip(group.plays, paths, strict=True)]
        rows = [path.columns(restarts=self._rules.past != "fixed", routes=self.sampling.routes) for path in paths]
        facts = [_facts(play, path) for play, path in zip(group.plays, paths, strict=True)]
        if self._rules.turn_rewards:
            for play, path, verdict, row, fact in zip(group.plays, paths, verdicts, rows, facts, strict=True):
                fact["turn_rewards"] = _turn_rewards(play, path, verdict)
                row["token_rewards"] = path.rewards(fact["turn_rewards"])
        batch = DataProto(
            {
                "prompts": Ragged.from_rows([torch.tensor(path.prompt, dtype=torch.int64) for path in paths]),
                **{name: Ragged.from_rows([row[name] for row in rows]) for name in rows[0]},
                "group_ids": torch.full((count,), begun.group_id, dtype=torch.int64),
                "sample_index": torch.arange(count),
                "truncated": torch.tensor([bool(play.cut) for play in group.plays]),
            },
            {
                "uid": [prompt.uid] * count,
                "prompt_text": [prompt.text] * count,
                "ground_truth": [prompt.ground_truth] * count,
                "data_source": [prompt.data_source] * count,
                "extra_info": [prompt.extra_info] * count,
                "messages": [play.messages for play in group.plays],
                "answer_text": [self._last_text(path) for path in paths],
                "episode": facts,
            },
            tokenizer=self._tokenizer,
        )
        return Made(begun.key, batch, tuple(verdicts))

    def _last_text(self, path: Trajectory) -> str:
        """Return the text of the last turn, without special tokens."""
        last = path.ids[len(path.ids) - path.turns[-1] :] if path.turns else []
        return str(self._tokenizer.decode(last, skip_special_tokens=True))


def _verdict(play: _Play, path: Trajectory) -> Verdict | None:
    """Return the verdict that the episode brought; a failure where it said nothing, since there is nothing to score."""
    assert play.ended is not None
    if play.ended.verdict is None and not path.turns:
        return failed("the episode ended before the policy said anything")
    return play.ended.verdict


def _turn_rewards(play: _Play, path: Trajectory, verdict: Verdict | None) -> list[float]:
    """Return a reward for each turn; none counts in an episode that failed."""
    assert play.ended is not None
    if verdict is not None and verdict.outcome is not Outcome.SCORED:
        return [0.0] * len(path.turns)
    given = list(play.ended.turn_rewards)
    return [*given, *[0.0] * (len(path.turns) - len(given))]


def _facts(play: _Play, path: Trajectory) -> dict[str, Any]:
    """Return what is worth knowing of one episode."""
    assert play.ended is not None
    facts = dict.fromkeys(("tool_calls", "tool_errors", "unparsed", "tool_ms"), 0.0) | dict(play.ended.facts)
    return {
        "turns": len(path.turns),
        "tool_calls": facts["tool_calls"],
        "tool_errors": facts["tool_errors"],
        "unparsed": facts["unparsed"],
        "tool_seconds": facts["tool_ms"] / 1000,
        "engine_seconds": play.engine_seconds,
        "seconds": play.ended.seconds,
        "sampled": sum(path.turns),
        "cut": play.cut,
        "rewritten": play.rewritten,
        "messages": play.messages,
    }
