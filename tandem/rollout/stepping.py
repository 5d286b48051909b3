"""What engines have in common that make a token at a time for everything in flight: turns, pauses, new weights."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from tandem.base.errors import ContractError, DeadlineError, TandemError
from tandem.models.layouts.positions import Context
from tandem.rollout.decode_lock import DecodeLock
from tandem.rollout.protocol import GroupOutput, GroupRequest, KeepKV, Sampling
from tandem.rollout.scheduler import Scheduler


class RunningGroups(Protocol):
    """The groups in flight of one ``generate``. All but ``count``, ``room`` and ``ended`` is called at a token boundary
    or with nobody else at work. ``RunningBatch`` holds those of the engine hf.
    """

    @property
    def count(self) -> int:
        """The number of samples in flight."""

    @property
    def room(self) -> int:
        """Groups that can start now."""

    @property
    def ended(self) -> bool:
        """A group has ended since the last ``take_finished``."""

    def fits(self, requests: Sequence[GroupRequest]) -> bool:
        """Say whether there is memory for these beside what is in flight. Raises ``ContractError`` for one that never
        fits.
        """

    def admit(self, requests: list[GroupRequest], version: int) -> None:
        """Begin these prompts, or go on with what they have begun."""

    def step(self, version: int) -> None:
        """Draw one token more for every sample, under weights ``version``."""

    def abort(self, keys: Collection[int | str] | None = None) -> list[GroupOutput]:
        """End everything in flight as it is, or the groups with these ``keys``; gives it, with what had ended
        before.
        """

    def take_finished(self) -> list[GroupOutput]:
        """Return the groups that have ended since the last call."""

    def close(self) -> None:
        """Drop what is in flight, which nobody wants."""


class SteppedEngine(ABC):
    """A ``RolloutEngine`` but for ``load`` and for what it generates with: a subclass starts what runs.

    ``max_num_batched_tokens`` is the token budget of one prefill. ``keep_kv``: samples that go on over a change of the
    weights keep the keys and values that the old ones gave, or have them computed again. ``whole``: there are weights
    to generate with. ``patience``: seconds that any wait at a token boundary may last, such as that for the end of a
    pause.
    """

    def __init__(
        self,
        *,
        version: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        keep_kv: KeepKV,
        context: Context | None,
        patience: float,
        whole: bool = True,
    ) -> None:
        self._version = version
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._recompute = keep_kv == "recompute"
        self._context = context
        self._calls = 0
        self._cancelled: list[frozenset[int | str]] = []  # an entry for each ``cancel``
        self._awake = True
        self._lacks = "" if whole else "no weights have been loaded yet"  # why it can't generate
        self._patience = patience
        self._boundary = DecodeLock(patience)
        self._applied_s = 0.0

    # --- for a subclass ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, sampling: Sampling) -> RunningGroups:
        """Return a batch of groups that are drawn by ``sampling``, with nothing in it yet."""

    def _ended(self, running: RunningGroups) -> None:
        """Give out all groups of ``running``, which have ended."""
        del running

    def _computing(self) -> AbstractContextManager[object]:
        """Return the context of tokens that are made one after the other."""
        return nullcontext()

    @contextmanager
    def _loading(self, version: int) -> Iterator[None]:
        """Hold off tokens while new weights come. If it fails half-way, nothing is generated after."""
        with self._boundary.change():
            started = time.perf_counter()
            self._lacks = "the last load() failed half-way"
            yield
            self._lacks, self._version = "", version
            self._applied_s = time.perf_counter() - started

    # --- the protocol ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def steps(self) -> int:
        """The number of decode steps so far."""
        return self._boundary.steps

    @property
    def applied_s(self) -> float:
        """Seconds that the last ``load`` took to put the weights in place."""
        return self._applied_s

    def ping(self, deadline_s: float) -> int:
        """Return the version, once the engine reaches a token boundary: what gets there in time is well."""
        with self._boundary.change(deadline_s):
            return self._version

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        """Answer the requests, batched continuously. Raises ``ContractError`` for one that can't be answered."""
        if not self._awake:
            raise TandemError("the rollout engine is asleep: call wake() before generate()")
        if sampling.samples > self._max_num_seqs:
            raise ContractError(
                f"max_num_seqs = {self._max_num_seqs} has no room for the {sampling.samples} samples of one prompt: "
                f"write at least {sampling.samples}"
            )
        return self._generate(requests, sampling)

    def _generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        self._calls += 1
        try:
            running = self._open(sampling)
        except BaseException:
            self._calls -= 1
            raise
        window = self._max_num_seqs // sampling.samples
        waiting = Scheduler(requests, sampling, window, self._context, running.fits)
        version, aborts, cancels = self._version, self._boundary.aborts, len(self._cancelled)
        try:
            while True:
                if self._boundary.aborts != aborts:
                    aborts = self._boundary.aborts
                    yield from running.abort()
                if len(self._cancelled) != cancels:
                    keys = frozenset[int | str]().union(*self._cancelled[cancels:])
                    cancels = len(self._cancelled)
                    yield from waiting.cancel(keys)
                    yield from running.abort(keys)
                if self._version != version:
                    version = self._version
                    if self._recompute:
                        waiting.give_back(group.resumed() for group in running.abort())
                if running.room and waiting.empty:
                    waiting.pull(idle=running.count == 0)
                if running.count == 0 and waiting.empty:
                    break
                self._advance(waiting, running, version, aborts, cancels)
                yield from running.take_finished()
        finally:
            self._calls -= 1
            running.close()
        self._ended(running)

    def _advance(self, waiting: Scheduler, running: RunningGroups, version: int, aborts: int, cancels: int) -> None:
        """Make tokens until a group ends, the source should be asked, the weights change, or something is aborted."""
        with self._computing():
            while True:
                with self._boundary.token(aborts) as going:
                    if not going or self._version != version or len(self._cancelled) != cancels:
                        return
                    if self._lacks:
                        raise TandemError(f"{self._lacks}: load a complete set of weights first")
                    while running.room and (taken := waiting.take(running.room, self._max_num_batched_tokens)):
                        running.admit(taken, version)
                    running.step(version)
                if running.ended or (running.room and waiting.empty and not waiting.exhausted):
                    return
                if running.count == 0 and waiting.blocked:
                    self._await_memory(waiting, aborts)

    def _await_memory(self, waiting: Scheduler, aborts: int) -> None:
        """Return once the first that waits has room; what takes it is another ``generate``."""
        until = time.monotonic() + self._patience
        while waiting.blocked and self._boundary.aborts == aborts:
            if time.monotonic() > until:
                raise DeadlineError(
                    f"generation waited {self._patience:g} s for memory of keys and values; blocked by another "
                    "generate() that has it: let that one go on, or raise actor_rollout_ref.rollout.kv_cache_gib"
                )
            time.sleep(0.01)

    def pause(self, abort: bool = False) -> None:
        self._boundary.pause(abort)

    def resume(self) -> None:
        self._boundary.resume()

    def cancel(self, keys: Iterable[int | str]) -> None:
        """Have every generation under way end those of these groups that are its own, at its next token."""
        self._cancelled.append(frozenset(keys))

    def sleep(self) -> None:
        if self._calls:
            raise TandemError("sleep() while generate() is at work: exhaust or close its iterator first")
        self._awake = False

    def wake(self) -> None:
        self._awake = True
