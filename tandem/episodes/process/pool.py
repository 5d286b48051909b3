"""Episodes in processes that can be ended, while the caller does something else."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from tandem.base.errors import TandemError
from tandem.episodes.policy import Task
from tandem.episodes.process.spec import EpisodeSpec
from tandem.episodes.text_stream import Part
from tandem.reward.outcome import Outcome, Verdict, failed
from tandem.reward.process.child import ForeignProcess
from tandem.reward.process.watch import Watch
from tandem.reward.process.wire import unpack_verdicts
from tandem.reward.temporary import clear_left_over

_MODULE = "tandem.episodes.process.worker"
_TICK_S = 0.5  # between looks at processes that say nothing
_STARTS = 3  # processes in a row that end before they are ready
_PARTS = 4  # into which the episodes of a process that ended are divided
_GRACE_S = 2.0  # for an episode that was cancelled to end by itself
_NONE: Mapping[int, Sequence[float]] = {}


@dataclass(frozen=True)
class Asks:
    """An episode asks the policy something. ``number`` belongs to this question alone."""

    id: str
    number: int
    question: Mapping[str, Any]


@dataclass(frozen=True)
class Restarted:
    """An episode has begun anew: what it did counts no more."""

    id: str


@dataclass(frozen=True)
class Ended:
    """An episode has ended. ``verdict`` None: its last answer is to be scored. ``seconds`` of its own.

    ``turn_rewards``: what the turns of each of its branches got besides, as far as it gave any.
    """

    id: str
    verdict: Verdict | None
    facts: Mapping[str, float]
    seconds: float
    turn_rewards: Mapping[int, Sequence[float]] = field(default_factory=dict)


Event: TypeAlias = Asks | Restarted | Ended
Listener: TypeAlias = "queue.SimpleQueue[Event]"


@dataclass(eq=False)
class _Play:
    """An episode under way. ``left`` of its own time, which runs ``since`` then, or stands still while it asks.

    ``asking``: the numbers of its questions under way, and what its process calls them.

    ``share``: a process has ended with this and others in it, and it begins anew with at most so many in one.
    """

    id: str
    task: Task
    listener: Listener
    left: float
    share: int | None = None
    since: float | None = None
    asking: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False

    def pause(self) -> None:
        """Stop its clock: it waits for the policy."""
        if self.since is not None:
            self.left -= time.monotonic() - self.since
            self.since = None

    @property
    def due(self) -> float:
        """When its time is up, on the monotonic clock."""
        return float("inf") if self.since is None else self.since + self.left


@dataclass(eq=False)
class _Place:
    """A process and its episodes; ``leaving``: it takes no more. ``share``: it is for so many that are suspected."""

    process: ForeignProcess
    share: int | None = None
    plays: dict[str, _Play] = field(default_factory=dict)
    leaving: bool = False


class EpisodePool:
    """Plays what is begun; questions of the episodes and their ends come to the listener given with each.

    An episode that takes too long outside of the policy is cancelled; where that has no effect its process is ended.
    The episodes that were in it begin anew, a quarter of them in a process each, and so on until one has ended a
    process in which it was alone: that one has failed. One thread sees to all this, so every method returns at once. No
    process outlives the pool or its owner.
    """

    def __init__(self, spec: EpisodeSpec) -> None:
        clear_left_over()
        self._spec = spec
        path = [folder or os.getcwd() for folder in sys.path]
        places = {"path": path, "pythonpath": os.environ.get("PYTHONPATH")}
        self._setup = json.dumps({**places, **asdict(spec)}).encode()
        self._path = path
        self._numbers = itertools.count()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[_Play] = deque()
        self._where: dict[str, _Place] = {}
        self._ready = threading.Event()
        self._broken: str | None = None
        self._closing = False
        self._failed_starts = 0
        self._watch = Watch()
        self._places = [self._start() for _ in range(spec.workers)]
        self._thread = threading.Thread(target=self._run, name="tandem-episodes", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> EpisodePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the children alive, ready or starting."""
        return [place.process.pid for place in list(self._places)]

    def number(self) -> int:
        """Return a number that nobody had before, to name episodes by."""
        return next(self._numbers)

    def await_ready(self) -> None:
        """Wait until an episode can begin. Raises ``TandemError`` if none will."""
        while not self._ready.wait(_TICK_S):
            self.check()

    def begin(self, name: str, task: Task, listener: Listener) -> None:
        """Begin the episode ``name``, or have it wait for a place."""
        play = _Play(name, task, listener, self._spec.timeout_s)
        self._order(lambda: self._waiting.append(play))

    def answer(self, name: str, number: int, reply: Mapping[str, Any]) -> None:
        """Give an episode the answer to its question ``number``; nothing happens where it has begun anew since."""
        self._order(lambda: self._reply(name, number, reply))

    def send_part(self, name: str, number: int, part: Part) -> None:
        """Give an episode a part of the answer to its question ``number``, as ``answer`` gives the whole."""
        self._order(lambda: self._send_part(name, number, part))

    def cancel(self, name: str) -> None:
        """Forget the episode, which nobody wants any more; its listener hears nothing of it."""
        self._order(lambda: self._forget(name))

    def check(self) -> None:
        """Raise ``TandemError`` once nothing can be played any more."""
        if self._broken is not None:
            raise TandemError(
                f"no episode can be played: {self._broken}. Mend the episode, its tools or its parameters"
            )

    def activity(self) -> str:
        """Say how many episodes are at work outside of the policy, since when, and how many wait for a place."""
        now = time.monotonic()
        busy = [now - play.since for place in list(self._places) for play in list(place.plays.values()) if play.since]
        longest = f", the longest for {max(busy):.1f} s" if busy else ""
        return f"{len(busy)} at work{longest}, {len(self._waiting)} wait for a place"

    def close(self) -> None:
        """End the processes at once; what isn't over stays so. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        self._watch.wake()
        self._thread.join()
        self._watch.close()

    def _order(self, do: Callable[[], None]) -> None:
        """Have the thread do it. Raises ``TandemError`` once nothing can be played any more."""
        self.check()
        if not self._closing:
            self._orders.put(do)
            self._watch.wake()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing and self._broken is None:
                for place in self._watch.wait(self._patience()):
                    self._read(place)
                while not self._orders.empty():
                    self._orders.get()()
                self._keep_time()
                self._assign()
        except Exception:
            self._broken = f"the pool's thread failed:\n{traceback.format_exc()}"
        finally:
            for place in self._places:
                place.process.kill()
            self._places = []

    def _read(self, place: _Place) -> None:
        for text in place.process.inbox.messages():
            message = json.loads(text)
            match message.pop("kind"):
                case "ready":
                    place.process.ready = True
                    self._failed_starts = 0
                    self._ready.set()
                case "broken":
                    self._broken = f"it can't be made: {message['text']}"
                case "asks":
                    self._asked(place, message)
                case _:
                    self._ended(place, message)
        if place.process.inbox.closed and self._broken is None:
            self._replace(place)

    def _asked(self, place: _Place, message: dict[str, Any]) -> None:
        play = place.plays.get(message.pop("id"))
        if play is not None and not play.cancelled:
            play.pause()
            number = self.number()
            play.asking[number] = message.pop("mark")
            play.listener.put(Asks(play.id, number, message))

    def _ended(self, place: _Place, message: dict[str, Any]) -> None:
        play = place.plays.pop(message["id"], None)
        place.leaving = place.leaving or message["leaked"] or place.share is not None
        if play is not None and play.id in self._where:
            play.pause()
            verdict = None if message["verdict"] is None else unpack_verdicts(message["verdict"])[1][0]
            rewards = {} if play.cancelled else message["turn_rewards"]
            given = {int(branch): turns for branch, turns in rewards.items()}
            self._report_end(play, self._timed_out() if play.cancelled else verdict, message["facts"], given)
        if place.leaving and not place.plays:
            self._remove(place)

    def _report_end(
        self,
        play: _Play,
        verdict: Verdict | None,
        facts: Mapping[str, float],
        turn_rewards: Mapping[int, Sequence[float]] = _NONE,
    ) -> None:
        self._where.pop(play.id, None)
        play.listener.put(Ended(play.id, verdict, facts, self._spec.timeout_s - play.left, turn_rewards))

    def _timed_out(self) -> Verdict:
        reason = f"took more than {self._spec.timeout_s:g} s outside of the policy"
        return Verdict(float("nan"), Outcome.TIMED_OUT, reason)

    def _reply(self, name: str, number: int, reply: Mapping[str, Any]) -> None:
        place = self._where.get(name)
        if place is not None and number in (play := place.plays[name]).asking:
            mark = play.asking.pop(number)
            if not play.asking:
                play.since = time.monotonic()
            self._send(place, kind="answer", id=name, mark=mark, reply=reply)

    def _send_part(self, name: str, number: int, part: Part) -> None:
        place = self._where.get(name)
        if place is not None and number in place.plays[name].asking:
            self._send(place, kind="part", id=name, mark=place.plays[name].asking[number], part=part)

    def _forget(self, name: str) -> None:
        self._waiting = deque(play for play in self._waiting if play.id != name)
        place = self._where.pop(name, None)
        if place is not None:
            play = place.plays[name]
            play.cancelled, play.since, play.left = True, time.monotonic(), _GRACE_S
            self._send(place, kind="cancel", id=name)

    def _keep_time(self) -> None:
        """End episodes that are late, by cancelling them, and processes in which one doesn't let itself be
        cancelled.
        """
        now = time.monotonic()
        for place in list(self._places):
            if not place.process.ready and now > place.process.since + self._spec.start_s:
                self._replace(place)
                continue
            for play in [play for play in place.plays.values() if now > play.due]:
                if play.cancelled:
                    self._replace(place, hangs=True)
                    break
                play.cancelled, play.since, play.left = True, now, _GRACE_S
                self._send(place, kind="cancel", id=play.id)

    def _replace(self, place: _Place, *, hangs: bool = False) -> None:
        """End a process that is gone, or in which something ``hangs``; settle the episodes that were in it.

        Any of several may have been the cause, also of a hang, which keeps all of them from going on.
        """
        ending, ready = self._remove(place), place.process.ready
        if not ready:
            self._failed_starts += 1
            if self._failed_starts == _STARTS:
                self._broken = f"{_STARTS} processes in a row didn't start; the last one {ending}"
        for play in list(place.plays.values()):
            if play.id not in self._where:  # forgotten
                continue
            if len(place.plays) == 1:
                self._report_end(play, self._timed_out() if hangs else failed(f"its process {ending}"), {})
            else:
                del self._where[play.id]
                play.listener.put(Restarted(play.id))
                share = max(1, len(place.plays) // _PARTS)
                self._waiting.appendleft(_Play(play.id, play.task, play.listener, self._spec.timeout_s, share=share))

    def _remove(self, place: _Place) -> str:
        """End a process; another takes its place, unless it was for suspected episodes."""
        self._watch.remove(place.process.channel)
        ending = place.process.kill()
        self._places.remove(place)
        if place.share is None and self._broken is None:
            self._places.append(self._start())
        return ending

    def _start(self, share: int | None = None) -> _Place:
        place = _Place(ForeignProcess(_MODULE, self._path, self._setup), share)
        self._watch.add(place.process.channel, place)
        return place

    def _assign(self) -> None:
        """Begin what waits where there is room; what is suspected gets processes of its own."""
        later: deque[_Play] = deque()
        full: set[int | None] = set()
        for play in self._waiting:
            place = None if play.share in full else self._place_for(play.share)
            if place is None:
                full.add(play.share)
                later.append(play)
                continue
            play.since = time.monotonic()
            place.plays[play.id], self._where[play.id] = play, place
            self._send(place, kind="begin", id=play.id, task=asdict(play.task))
        self._waiting = later
        suspected = [play.share for play in later if play.share is not None]
        for place in [p for p in self._places if p.share is not None and not p.plays and p.share not in suspected]:
            self._remove(place)
        lonely = [place for place in self._places if place.share is not None]
        coming = [place.share for place in lonely if not place.process.ready]
        if suspected and suspected[0] not in coming and len(lonely) < self._spec.workers:
            self._places.append(self._start(suspected[0]))

    def _place_for(self, share: int | None) -> _Place | None:
        """Return the emptiest process that takes one more episode, of those that are suspected alike or of the usual
        ones.
        """
        most = self._spec.concurrency if share is None else share
        fit = [p for p in self._places if p.share == share and p.process.ready and not p.leaving]
        free = [p for p in fit if len(p.plays) < most]
        return min(free, key=lambda p: len(p.plays)) if free else None

    def _patience(self) -> float:
        """Return seconds until something must be looked at again, at most a tick."""
        dues = [play.due for place in self._places for play in place.plays.values()]
        return max(0.0, min([_TICK_S, *(due - time.monotonic() for due in dues)]))

    @staticmethod
    def _send(place: _Place, **message: Any) -> None:
        place.process.send(json.dumps(message).encode())
