"""A scoring process: reads jobs from its socket, answers with verdicts, ends with its parent.

Started as ``python -m tandem.reward.worker FD PARENT``, so it never imports the user's ``__main__``. Whatever a scorer
prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from typing import Any

from tandem.reward.outcome import Sample, Verdict, failed, timed_out
from tandem.reward.resolve import bind
from tandem.reward.scoring import Scorer, describe_error, run_now
from tandem.reward.wire import Setup, pack_verdicts, receive, send

_WATCH_S = 0.5
_LAST_RESORT_S = 5.0


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes the socket or is gone."""
    os.dup2(sys.stderr.fileno(), 1)
    channel = socket.socket(fileno=fd)
    first = receive(channel)
    if first is None:
        return
    setup: Setup = pickle.loads(first)
    threading.Thread(target=_end_with, args=(parent, setup.deadline_s), daemon=True).start()
    sys.path[:] = setup.path
    try:
        scorer = bind(setup.spec)
        tokenizer = None if setup.tokenizer is None else pickle.loads(setup.tokenizer)
    except BaseException as error:
        send(channel, json.dumps({"broken": describe_error(error)}).encode())
        return
    send(channel, json.dumps({"ready": True}).encode())
    while (message := receive(channel)) is not None:
        jobs: list[bytes] = pickle.loads(message)
        if scorer.call.is_batch:
            _score_batch(channel, scorer, jobs[0], tokenizer)
        elif scorer.call.is_async:
            _score_together(channel, scorer, jobs, setup.deadline_s)
        else:
            _score_in_turn(channel, scorer, jobs)


def _score_in_turn(channel: socket.socket, scorer: Scorer, jobs: list[bytes]) -> None:
    for i, job in enumerate(jobs):
        started = time.perf_counter()
        try:
            verdict = run_now(scorer.score(Sample(*pickle.loads(job))))
        except BaseException as error:  # also SystemExit and the like: only the sample fails
            verdict = failed(describe_error(error))
        send(channel, pack_verdicts(i, [verdict], time.perf_counter() - started))


def _score_together(channel: socket.socket, scorer: Scorer, jobs: list[bytes], deadline_s: float) -> None:
    """All jobs at once, each with its own deadline; the pool's deadline is for those that never give way."""
    import asyncio  # a third of the start of a process that doesn't need it

    async def one(i: int, job: bytes) -> None:
        started = time.perf_counter()
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                verdict = await scorer.score(Sample(*pickle.loads(job)))
        except BaseException as error:
            verdict = timed_out(deadline_s) if limit.expired() else failed(describe_error(error))
        send(channel, pack_verdicts(i, [verdict], time.perf_counter() - started))

    async def all_of_them() -> None:
        await asyncio.gather(*(one(i, job) for i, job in enumerate(jobs)))

    asyncio.run(all_of_them())


def _score_batch(channel: socket.socket, scorer: Scorer, job: bytes, tokenizer: Any) -> None:
    import asyncio

    from tandem.columns.proto import DataProto  # imports torch: only where a scorer wants a batch

    started = time.perf_counter()
    data, rows = pickle.loads(job)
    try:
        scoring = scorer.score_batch(DataProto.from_bytes(data, tokenizer), [Sample(*row) for row in rows])
        verdicts: list[Verdict] = asyncio.run(scoring) if scorer.call.is_async else run_now(scoring)
    except BaseException as error:
        verdicts = [failed(describe_error(error))] * len(rows)
    send(channel, pack_verdicts(0, verdicts, time.perf_counter() - started))


def _end_with(parent: int, deadline_s: float) -> None:
    """Kill this process and what it started once the parent is gone, whatever the scorer is doing.

    A scorer inside one long C call (a regular expression, say) holds the interpreter, and then this thread doesn't run;
    ``faulthandler`` has a timer that needs no interpreter, and it is set again while this thread does run.
    """
    with open(os.devnull, "w") as nowhere:
        while os.getppid() == parent:
            faulthandler.dump_traceback_later(deadline_s + _LAST_RESORT_S, exit=True, file=nowhere)
            time.sleep(_WATCH_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
