"""A scoring process: reads jobs from its socket, answers with verdicts, ends with its parent.

Started as ``python -m tandem.reward.process.worker FD PARENT``, so it never imports the user's ``__main__``. Whatever
a scorer prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import socket
import sys
import threading
import time
from typing import Any

from tandem.reward.outcome import Sample, Verdict, failed, timed_out
from tandem.reward.process.lifeline import LastResort, clear, end_with
from tandem.reward.process.wire import Setup, pack_verdicts, receive, send
from tandem.reward.resolve import bind
from tandem.reward.scoring import Scorer, describe_error, run_now

_LAST_RESORT_S = 2.0  # beyond the deadline, at which a living parent has ended this process


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes the socket or is gone."""
    os.dup2(2, 1)
    channel = socket.socket(fileno=fd)
    first = receive(channel)
    if first is None:
        return
    setup: Setup = pickle.loads(first)
    last_resort = LastResort(setup.deadline_s + _LAST_RESORT_S)
    threading.Thread(target=end_with, args=(parent, last_resort), daemon=True).start()
    sys.path[:] = setup.path
    try:
        scorer = bind(setup.spec)
        if scorer.call.is_batch:
            importlib.import_module("tandem.columns.proto")  # with torch: now, not at the first batch's expense
        tokenizer = None if setup.tokenizer is None else pickle.loads(setup.tokenizer)
    except BaseException as error:
        send(channel, json.dumps({"broken": describe_error(error)}).encode())
        return
    last_resort.arm()
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
    """Score all jobs at once, each with its own deadline; the pool's deadline is for those that never give way."""
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

    from tandem.columns.proto import DataProto  # only here: other scorers need no torch

    started = time.perf_counter()
    data, rows = pickle.loads(job)
    try:
        scoring = scorer.score_batch(DataProto.from_bytes(data, tokenizer), [Sample(*row) for row in rows])
        verdicts: list[Verdict] = asyncio.run(scoring) if scorer.call.is_async else run_now(scoring)
    except BaseException as error:
        verdicts = [failed(describe_error(error))] * len(rows)
    send(channel, pack_verdicts(0, verdicts, time.perf_counter() - started))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    finally:
        clear()
