"""Scoring in processes that can be killed, while the caller does something else."""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any

from tandem.base.deadline import Deadline
from tandem.base.errors import RewardError
from tandem.reward.outcome import PROCESS, Outcome, Scores, Verdict, failed, timed_out
from tandem.reward.process.child import ScoringProcess
from tandem.reward.process.job import Group, Handle, Job, make_jobs
from tandem.reward.process.watch import Watch
from tandem.reward.process.wire import Setup, unpack_verdicts
from tandem.reward.scoring import ScorerSpec
from tandem.reward.temporary import clear_left_over

logger = logging.getLogger(__name__)

_TICK_S = 1.0  # between looks at processes that say nothing
_LOOK_S = 0.25  # between looks, of one who waits for scores, at whether the pool still works
_STARTS = 3  # processes in a row that end before they are ready
_DEATHS = 8  # processes in a row that end in a scoring, before anything is scored; each costs a start
_DEATHS_LATER = 64  # the same of a scorer that has scored: one that often dies is no use either
_GRACE_S = 1.0  # for async scorers, which keep their deadlines themselves if they can
_MESSAGE_S = 0.02  # of scoring in one message: long against what a message costs, short against a deadline
_MOST_PER_MESSAGE = 64
_TOGETHER = 16  # async scorings at a time in one process


class ScoringPool:
    """``workers`` processes that score what is submitted, each scoring with ``deadline_s`` seconds.

    A scoring is one sample, or for a scorer of batches one submitted group. One that isn't done in time is ended with
    its process, and another process takes its place; a process that dies fails the sample that it was scoring. Other
    samples are not affected. Where process after process dies and nothing is scored, the pool ends. One thread sees to
    all of this, so ``submit`` returns at once. No process outlives the pool or its owner, however that ends.

    ``start_s`` is a process's time to get ready: imports, the scorer's constructor and what it loads.
    ``tokenizer`` goes to the processes of a batch scorer, which finds it on the DataProto and on its items.
    Raises ``RewardError`` where another process can't find the scorer's code.
    """

    def __init__(
        self,
        spec: ScorerSpec,
        *,
        workers: int = 1,
        deadline_s: float = 30.0,
        start_s: float = 120.0,
        tokenizer: Any = None,
    ) -> None:
        _check_importable(spec)
        clear_left_over()
        self._call = spec.call
        self._name = f"the scorer {spec.type!r}" + (f" of {spec.file}" if spec.file else "")
        self._deadline_s, self._start_s = deadline_s, start_s
        self._ready = threading.Event()
        sent_tokenizer = pickle.dumps(tokenizer) if spec.call.is_batch and tokenizer is not None else None
        self._setup = Setup(spec, [folder or os.getcwd() for folder in sys.path], deadline_s, sent_tokenizer)
        self._pending: deque[Job] = deque()
        self._lock = threading.Lock()  # of _pending, _broken and _closing
        self._broken: str | None = None
        self._closing = False
        self._failed_starts = 0
        self._deaths = 0  # in a row, in scorings
        self._scored = False  # anything, ever
        self._warned: set[Outcome] = set()
        self._mean_s = _MESSAGE_S / 4  # of one scoring; learned
        self._watch = Watch()
        self._processes = [self._start() for _ in range(workers)]
        self._thread = threading.Thread(target=self._run, name="tandem-rewards", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the children alive, ready or starting."""
        return [process.pid for process in self._processes]

    def await_ready(self) -> None:
        """Wait until one process can score. Raises ``RewardError`` if none will."""
        while not self._ready.wait(_LOOK_S):
            with self._lock:
                self._check_alive()

    def submit(self, group: Group, label: str = "group") -> Handle:
        """Have the samples of a group scored; returns at once. ``label`` names the group in messages.

        Raises ``RewardError`` once the pool can't score any more (the scorer doesn't start, or the pool is closed).
        """
        handle = Handle(label, len(group))
        jobs = make_jobs(group, self._call, handle)
        with self._lock:
            self._check_alive()
            self._pending.extend(jobs)
        self._watch.wake()
        return handle

    def collect(self, handle: Handle, deadline: Deadline) -> Scores:
        """Wait for the scores of a group, in any order of groups.

        Raises ``DeadlineError`` naming the samples that are awaited and what the processes do, or ``RewardError`` once
        the pool can't score any more.
        """
        while not handle.wait(min(deadline.left, _LOOK_S)):
            with self._lock:
                self._check_alive()
            deadline.check(f"the rewards of {', '.join(handle.missing())}", self.activity())
        return handle.scores()

    def check(self) -> None:
        """Raise ``RewardError`` once the pool can't score any more: who polls handles would wait in vain."""
        with self._lock:
            self._check_alive()

    def activity(self) -> str:
        """Return which process scores what, since when, and how much waits."""
        now = time.monotonic()
        doing = [f"process {p.pid} {p.activity} for {now - p.since:.1f} s" for p in list(self._processes) if not p.idle]
        return f"{'; '.join(doing) or 'no process'}; {len(self._pending)} jobs wait"

    def close(self) -> None:
        """End the processes at once; what isn't scored stays so. Safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        atexit.unregister(self.close)
        self._watch.wake()
        self._thread.join()
        self._watch.close()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Read answers, hand out jobs and keep deadlines until the pool is closed or broken."""
        try:
            while not self._closing and self._broken is None:
                for process in self._watch.wait(self._patience()):
                    self._read(process)
                for process in [p for p in self._processes if self._overdue(p)]:
                    self._replace(process, late=True)
                self._assign()
        except Exception:
            self._break(f"the pool's thread failed:\n{traceback.format_exc()}")
        finally:
            for process in self._processes:
                process.kill()
            self._processes = []

    def _read(self, process: ScoringProcess) -> None:
        for message in process.inbox.messages():
            answer = json.loads(message)
            if "broken" in answer:
                self._break(f"the scorer can't be made: {answer['broken']}")
            elif "ready" in answer:
                process.ready = True
                self._ready.set()
                self._failed_starts = 0
            else:
                number, verdicts, seconds = unpack_verdicts(answer)
                process.answer(number).put(verdicts)
                self._deaths = 0
                self._scored = self._scored or any(verdict.outcome is Outcome.SCORED for verdict in verdicts)
                self._mean_s += 0.1 * (seconds - self._mean_s)
        if process.inbox.closed and self._broken is None:
            self._replace(process, late=False)

    def _replace(self, process: ScoringProcess, *, late: bool) -> None:
        """End a process that is late or gone, start another in its place, then settle its jobs."""
        self._watch.remove(process.channel)
        ending = process.kill()
        if not process.ready:
            self._count_failed_start(f"didn't get ready in {self._start_s:g} s" if late else ending)
        left = process.unanswered
        if left and not late:
            self._count_death(left[0], ending)
        place = self._processes.index(process)
        self._processes[place : place + 1] = [self._start()] if self._broken is None else []
        if len(left) > 1 and self._call.is_async:  # all were under way and any may have been the cause
            self._put_back([job.isolated() for job in left])
            return
        verdict = timed_out(self._deadline_s) if late else failed(f"{PROCESS} {ending}")
        for job in left[:1]:
            job.put([verdict])
            self._warn(job, verdict)
        self._put_back(left[1:])

    def _count_failed_start(self, ending: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == _STARTS:
            self._break(f"{_STARTS} scoring processes in a row didn't start; the last one {ending}")

    def _count_death(self, job: Job, ending: str) -> None:
        self._deaths += 1
        if self._deaths >= (_DEATHS_LATER if self._scored else _DEATHS):
            nothing = "" if self._scored else ", and nothing was scored"
            self._break(
                f"{self._name} ended its process {self._deaths} times in a row{nothing}; the last process, at "
                f"{job.name}, {ending}"
            )

    def _start(self) -> ScoringProcess:
        process = ScoringProcess(self._setup)
        self._watch.add(process.channel, process)
        return process

    def _put_back(self, jobs: list[Job]) -> None:
        with self._lock:
            self._pending.extendleft(reversed(jobs))

    def _assign(self) -> None:
        """Give every idle process a message; one that is found dead is replaced on the next look."""
        for process in self._processes:
            if process.idle:
                with self._lock:
                    jobs = self._next_message()
                if jobs:
                    process.assign(jobs)

    def _next_message(self) -> list[Job]:
        """Return so many jobs that they take about ``_MESSAGE_S``; a job that must be alone is."""
        most = min(_MOST_PER_MESSAGE, max(1, int(_MESSAGE_S / max(self._mean_s, 1e-6))))
        if self._call.is_batch:
            most = 1
        elif self._call.is_async:
            most = _TOGETHER
        jobs: list[Job] = []
        while self._pending and len(jobs) < most and not (jobs and (jobs[-1].alone or self._pending[0].alone)):
            jobs.append(self._pending.popleft())
        return jobs

    def _limit(self, process: ScoringProcess) -> float:
        """Return when the process is overdue, on the monotonic clock; never if it is idle."""
        if not process.ready:
            return process.since + self._start_s
        if not process.jobs:
            return float("inf")
        return process.since + self._deadline_s + (_GRACE_S if self._call.is_async else 0.0)

    def _overdue(self, process: ScoringProcess) -> bool:
        return time.monotonic() > self._limit(process)

    def _patience(self) -> float:
        """Return the seconds until something must be looked at again, at most a tick."""
        limits = [self._limit(process) for process in self._processes]
        return max(0.0, min([time.monotonic() + _TICK_S, *limits]) - time.monotonic())

    # --- saying what is wrong ----------------------------------------------------------------------------------------

    def _break(self, reason: str) -> None:
        with self._lock:
            self._broken = reason

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise RewardError(f"nothing can be scored: {self._broken}. Mend the scorer or its parameters")
        if self._closing:
            raise RewardError("nothing can be scored: the pool is closed")

    def _warn(self, job: Job, verdict: Verdict) -> None:
        """Tell the first loss of each kind: each costs a process, and none is seen before its step is over."""
        if verdict.outcome not in self._warned:
            self._warned.add(verdict.outcome)
            logger.warning(
                "no reward for %s: %s. Another process takes its place; from now on see the metric reward/%s",
                job.name,
                verdict.reason,
                verdict.outcome,
            )


def _check_importable(spec: ScorerSpec) -> None:
    if spec.module == "__main__" and spec.file is None:
        raise RewardError(
            f"reward {spec.type!r} is defined in the script that runs, which scoring processes don't import. Move "
            "it to a file of its own and write file: FILE beside type, or list its module under plugins"
        )
    for _, inner in spec.parts:
        _check_importable(inner)
