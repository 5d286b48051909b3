"""The rollout role in a thread of its own: groups stream into the data plane while the actor trains."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

from tandem.base.errors import DeadlineError, EngineDiedError, TandemError
from tandem.data.prompts import Prompt
from tandem.data.sampler import Sampler
from tandem.dataflow.gate import Gate
from tandem.dataflow.store import DataPlane
from tandem.dataflow.tickets import Ticket
from tandem.reward.outcome import Scores
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.filling import Filling, Pending, Rollout
from tandem.roles.rollout.making import Making
from tandem.roles.rollout.spare_groups import SpareGroups
from tandem.roles.rollout.utilization import ScoringWait, Utilization, wall
from tandem.rollout.protocol import GroupRequest, RolloutEngine, Supervised
from tandem.rollout.scheduler import as_it_is
from tandem.rollout.sound import sound_outputs

_TICK_S = 0.05  # between looks at scorings while the engine has nothing to do
_ANSWER_S = 2.0  # for the parts of the data plane to give a sign of life
_LEAVE_S = 10.0  # for a loop whose engine has died to hand its tickets on


class RolloutWorker(Rollout):
    """The loop of one rollout engine, in a thread of its own.

    It consumes tickets that the gate admits and produces groups with their rewards in the data plane. It waits for the
    gate (unblocked by a publication), for the engine's next group, and for scorings; all of these end with ``stop``. An
    error in it is kept and raised to whoever calls ``check``. ``partial`` says what becomes of a group that the engine
    aborts: it goes on from its tokens, or begins again with the same seeds. ``clock`` gives the seconds that count as
    work of the engine.

    When the engine dies the loop leaves the gate at once, so that others get the groups that it owed, and ends after
    the scorings that are under way.
    """

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        source: Sampler[Prompt],
        rewards: RewardManager,
        plane: DataPlane,
        gate: Gate,
        filling: Filling,
        tokenizer: Any,
        *,
        partial: Literal["resume", "discard"] = "resume",
        clock: Callable[[], float] = wall,
        scoring_wait: ScoringWait | None = None,
        making: Making | None = None,
        spares: SpareGroups | None = None,
    ) -> None:
        super().__init__(name, engine, source, rewards, plane, gate, filling, tokenizer, scoring_wait, making, spares)
        self._partial = partial
        self.error: BaseException | None = None
        waited = self.scoring_wait
        self.utilization = Utilization(
            lambda: clock() - waited.blocked_s(name), lambda change: waited.generates(name, change)
        )
        self._pending: dict[Ticket, Pending] = {}
        self._by_key: dict[str, Ticket] = {}
        self._generating = 0  # groups
        self._unanswered = 0  # requests
        self._scores: defaultdict[int, list[Scores]] = defaultdict(list)
        self._again: deque[GroupRequest] = deque()
        self._stopping = threading.Event()
        self._left = threading.Event()
        self._resting = self._calling = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread of the loop."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the loop to end; groups that are being made are given up."""
        self._stopping.set()
        self._gate.wake()

    def join(self, seconds: float) -> None:
        """Wait for the end of a loop that was asked to end."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def rest(self, seconds: float) -> None:
        """Ask for no ticket until ``work``; returns once nothing is generated, so that the engine can sleep."""
        self._resting = True
        self._gate.wake()
        if not self._gate.wait(seconds, lambda: not self._calling or self.error is not None):
            raise DeadlineError(f"waited {seconds:g} s for {self.name} to finish what it generates and rest")

    def work(self) -> None:
        """Ask for tickets again after a rest."""
        self._resting = False
        self._gate.wake()

    def check(self) -> None:
        """Raise what ended the loop, if anything did; of a dead engine once its tickets are others'."""
        if isinstance(self.error, EngineDiedError):
            self._left.wait(_LEAVE_S)
        if self.error is not None:
            raise self.error
        if not self._thread.is_alive() and not self._stopping.is_set() and self._pending:
            raise TandemError(f"the loop of {self.name} ended with {len(self._pending)} groups unfinished")

    def drain(self, seconds: float) -> bool:
        """Wait until no sample is being generated; admit nothing meanwhile. Whether that was reached."""
        return self._gate.wait(seconds, lambda: self._generating == 0 or self.error is not None)

    def leave(self) -> None:
        """Make sure that the gate gives nothing to a loop whose engine has died."""
        self.utilization.abandon()
        if self._thread.is_alive() and self._left.wait(_LEAVE_S):
            return
        if not self._left.is_set():
            self._gate.leave(self.name)
            self._left.set()

    def take_scores(self, partition: int) -> list[Scores]:
        """Return the scorings of a partition that is over, those of dropped groups too."""
        return self._scores.pop(partition, [])

    def scores(self, partition: int | None = None) -> list[Scores]:
        """Return the scorings so far that weren't taken: of a partition, or of all that are under way."""
        numbers = sorted(self._scores.copy()) if partition is None else [partition]
        return [found for number in numbers for found in self._scores.get(number, ())]

    @property
    def generating(self) -> int:
        """Groups that the engine is generating now."""
        return self._generating

    @property
    def scoring(self) -> str | None:
        """Who scores what the engine has generated, in words; None where nothing waits for a score."""
        waiting = [t for t, group in self._pending.copy().items() if group.handle is not None and not group.handle.done]
        return self._rewards.activity() if waiting else None

    @property
    def outside(self) -> str:
        """What its episodes wait for outside of the engine, in words; empty for nothing."""
        return self._making.activity()

    def _run(self) -> None:
        try:
            try:
                self._serve()
            except EngineDiedError as error:
                self.error = error
                self._release_tickets()
        except BaseException as error:  # handed to the thread that trains
            self.error = error
        finally:
            self._making.abandon()
            self._gate.wake()

    def _serve(self) -> None:
        """Make one call of the engine after the other, with a rest in between."""
        while not self._stopping.is_set():
            if self._resting:
                self._watch_engine()
                self._gate.wait(_TICK_S)
                continue
            self._calling = True
            for output in sound_outputs(self.engine, self._stream(), self._making.sampling):
                self._unanswered -= 1
                if output.aborted and self._wants(output.request):
                    self._again.append(output.resumed() if self._partial == "resume" else output.restarted())
                else:
                    self._making.hear(output)
                self._keep_made()
                self._settle_done()
            self._calling = False
            self._gate.wake()

    def _release_tickets(self) -> None:
        """Give the tickets of a dead engine back: they go to others but for those whose groups are there and being
        scored.
        """
        self.utilization.abandon()
        self._making.abandon()
        self._pending = {ticket: group for ticket, group in self._pending.items() if group.handle is not None}
        self._gate.leave(self.name, self._pending.keys())
        self._left.set()
        while self._pending and not self._stopping.is_set():
            self._settle_done()
            self._idle()

    def _keep_made(self) -> None:
        """Store the groups that are whole."""
        for made in self._making.finished():
            ticket = self._by_key.pop(made.key)
            self._end(ticket)
            self._arrive(ticket, self._pending, made)

    def _end(self, ticket: Ticket) -> None:
        """Note that the engine has nothing more to do for the ticket."""
        self.utilization.end(ticket)
        self._generating -= 1
        if self._generating == 0:
            self._gate.wake()

    def _wants(self, request: GroupRequest) -> bool:
        """Return whether somebody waits for the group of a request."""
        return self._spares is None or self._spares.wants(self._by_key[str(request.key)])

    def _next_request(self) -> GroupRequest | None:
        """Return what the engine is to be asked now, if there is anything."""
        while (request := self._again.popleft() if self._again else self._making.next()) is not None:
            if self._wants(request):
                return request
            self._making.hear(as_it_is(request))
        return None

    def _stream(self) -> Iterator[GroupRequest | None]:
        """Yield the requests as tickets are admitted; None while there is nothing to ask and the engine is at work."""
        while not self._stopping.is_set():
            self._keep_made()
            self._settle_done()
            request = self._next_request()
            if request is not None:
                self._unanswered += 1
                yield request
                continue
            ticket = None if self._resting else self._gate.admit(self.name)
            if isinstance(ticket, Ticket):
                self._generating += 1
                self.utilization.begin(ticket)
                if not self._begin(ticket, self._pending, self._by_key):
                    self._end(ticket)
            elif self._unanswered:
                yield None
            elif self._resting and not self._pending:
                return
            else:  # also when all tickets are given out: one may come back
                self._watch_engine()
                self._idle()

    def _watch_engine(self) -> None:
        """Raise if the engine has died while nobody asked it for anything."""
        if isinstance(self.engine, Supervised):
            self.engine.check()

    def _idle(self) -> None:
        """Wait for an episode, a scoring, or the gate: nothing is generated and no ticket is free."""
        handles = [group.handle for group in self._pending.values() if group.handle is not None]
        if self._making.awaits:
            self._making.wait(_TICK_S)
        elif handles:
            handles[0].wait(_TICK_S)
        else:
            self._gate.wait(_TICK_S)

    def _settle_done(self) -> None:
        """Store the rewards of groups whose scoring has ended, or have their tickets drawn anew.

        Raises ``RewardError`` where those under way will never end.
        """
        if self._pending:
            self._rewards.check()
        done = [t for t, group in self._pending.items() if group.handle is not None and group.handle.done]
        for ticket in sorted(done):
            self._settle(ticket, self._pending.pop(ticket), self._scores[ticket.partition])
