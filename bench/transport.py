"""What it costs to bring weights into another process, by transport: against one plain ``copy_`` of as many bytes.

A push is what a run does: the snapshot here, the way, and the copy into the weights of the process that gets them. The
yardstick copies one flat tensor of as many bytes once. In turn, medians of wall seconds; fingerprints are left out, and
what arrived is compared once at the end. Run: ``python bench/transport.py [--megabytes 256] [--tensors 200]``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tandem.models.fingerprint import fingerprint
from tandem.models.shared_weights import Place, SharedWeights, map_weights
from tandem.transport.circle import LOOPBACK, Meeting, open_store
from tandem.transport.inbox import Inbox
from tandem.transport.outbox import Outbox
from tandem.weights.transfer import Transfer

SECONDS = 300.0
CPU = torch.device("cpu")
COPY = "copy_ of as many bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    found = measure(args.megabytes, args.tensors, args.bucket_mb, args.rounds)
    nbytes = args.megabytes * 10**6
    print(f"{args.megabytes} MB in {args.tensors} tensors, buckets of {args.bucket_mb} MiB")
    for name, taken in found.items():
        print(f"{name:24} {taken * 1000:8.1f} ms  {nbytes / 1e9 / taken:6.2f} GB/s  ratio {taken / found[COPY]:.2f}")


def measure(megabytes: int, tensors: int, bucket_mb: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, ``rounds`` times in turn."""
    each = megabytes * 10**6 // 4 // tensors
    live = {f"layer_{i}": torch.randn(each) for i in range(tensors)}
    flat = torch.cat(list(live.values()))
    target = torch.empty_like(flat)
    ours, theirs = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=receive, args=(theirs, each, tensors), daemon=True)
    child.start()
    shared, broadcast = Shared(live, ours, bucket_mb << 20), Broadcast(live, ours, bucket_mb << 20)
    ways: dict[str, Callable[[], object]] = {
        COPY: lambda: target.copy_(flat),
        "shared_memory": shared.push,
        "collective (gloo)": broadcast.push,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():  # memory is touched for the first time
        call()
    for _ in range(rounds):
        for name, call in ways.items():
            seconds[name].append(timed(call))
    for push in (shared.push, broadcast.push):
        live["layer_0"].add_(1.0)
        push()
        ours.send(["fingerprint"])
        assert ours.recv() == fingerprint(live.items())
    child.terminate()
    child.join()
    return {name: median(measured) for name, measured in seconds.items()}


def timed(call: Callable[[], object]) -> float:
    """Seconds on the clock."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Shared:
    """Pushes through memory that both processes map."""

    def __init__(self, live: dict[str, torch.Tensor], child: Connection, bucket_bytes: int) -> None:
        self._live, self._child = live, child
        self._memory = SharedWeights(bucket_bytes)

    def push(self) -> None:
        """Copy the weights, and return once the other process has them."""
        self._memory.write(self._live.items())
        path = f"/proc/{os.getpid()}/fd/{self._memory.fd}"
        self._child.send(["shared", path, [place.to_json() for place in self._memory.places]])
        self._child.recv()


class Broadcast:
    """Pushes by a broadcast between the two processes."""

    def __init__(self, live: dict[str, torch.Tensor], child: Connection, bucket_bytes: int) -> None:
        self._live, self._child, self._bucket_bytes = live, child, bucket_bytes
        self._box, self._number = Outbox(0, 1, CPU), 0
        self._store = open_store(LOOPBACK, None, timedelta(seconds=SECONDS))
        self._meeting = Meeting(LOOPBACK, self._store.port, "bench", 2, "gloo", SECONDS)

    def push(self) -> None:
        """Gather, while what is gathered is sent, and return once the other process has it."""
        self._number += 1
        self._box.open(self._number)
        self._child.send(["broadcast", self._meeting.to_json(), self._number, self._bucket_bytes])
        sent = Transfer("send", lambda: self._box.send(self._meeting, self._number, self._bucket_bytes))
        self._box.fill(self._live.items(), self._bucket_bytes)
        self._box.end()
        sent.result()
        self._child.recv()


def receive(owner: Connection, each: int, tensors: int) -> None:
    """Be the process of an engine: its weights are copied into."""
    torch.set_num_threads(1)
    own = {f"layer_{i}": torch.zeros(each) for i in range(tensors)}
    inbox = Inbox(CPU)
    while True:
        match owner.recv():
            case ["shared", path, places]:
                file = os.open(path, os.O_RDWR)
                take(own, map_weights(file, [Place.from_json(fields) for fields in places]))
                os.close(file)
                owner.send(None)
            case ["broadcast", meeting, number, piece_bytes]:
                inbox.receive(Meeting.from_json(meeting), 1, 1, number, piece_bytes)
                take(own, inbox.take(number))
                owner.send(None)
            case _:
                owner.send(fingerprint(own.items()))


def take(own: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy the weights in."""
    for name, tensor in weights:
        own[name].copy_(tensor)


if __name__ == "__main__":
    main()
