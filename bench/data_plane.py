"""Put, take and get of 10,000 samples of about 1,000 tokens: the two stores and the PyPI package TransferQueue.

    python bench/data_plane.py --tq-python TQ_ENV/bin/python [--json OUT]

Every side gets the same samples in the same pieces, one after the other on this machine, and ends with tensors that can
be computed with. A repetition puts everything, takes and gets everything, and clears; the fastest one counts, as the
least disturbed. TransferQueue needs an environment of its own: torch first, then ``TransferQueue==0.1.11`` with that
torch as a constraint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import torch

N = 8
"""Samples of a group."""
SMALL_TAKES = 50
DTYPES = {"responses": torch.int64, "rollout_logprobs": torch.float32, "response_mask": torch.bool}


class Sizes(NamedTuple):
    samples: int
    tokens: int
    pieces: int
    repetitions: int


Columns = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name -> (values, offsets)."""


def pieces(sizes: Sizes) -> list[Columns]:
    """The samples, lengths uniform within ± 50 % of the mean, cut into equal parts."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(sizes.tokens // 2, sizes.tokens * 3 // 2, (sizes.samples,), generator=generator)
    cut = []
    for part in lengths.chunk(sizes.pieces):
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), part.cumsum(0)])
        values = torch.arange(int(offsets[-1])) % 50_000
        cut.append({name: (values.to(dtype), offsets) for name, dtype in DTYPES.items()})
    return cut


def nbytes(parts: list[Columns]) -> int:
    return sum(values.nbytes for part in parts for values, _ in part.values())


def tandem_side(store: str, sizes: Sizes) -> dict[str, float]:
    from tandem.columns.proto import DataProto
    from tandem.columns.ragged import Ragged
    from tandem.dataflow.ledger import Ledger
    from tandem.dataflow.ray.store import RayStore
    from tandem.dataflow.store import DataPlane, LocalStore
    from tandem.dataflow.tickets import Request, Ticket

    groups = sizes.samples // N
    each = groups // sizes.pieces
    ledger = Ledger(groups, N, capacity=2 * groups, max_draws=2)
    plane: DataPlane
    if store == "ray":
        import ray

        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=2**30)
        plane = RayStore.start(ledger, 600.0, units=2)
    else:
        plane = LocalStore(ledger, 600.0)
    batches = [
        DataProto({name: Ragged(values, offsets) for name, (values, offsets) in part.items()}) for part in pieces(sizes)
    ]

    def put(step: int) -> None:
        for i, batch in enumerate(batches):
            plane.put([Ticket(step, i * each + g) for g in range(each)], batch, timeout=60)

    def get(step: int) -> int:
        tokens = 0
        while lease := plane.take(Request("train", list(DTYPES), each, step), timeout=60):
            batch = plane.get(lease.tickets, list(DTYPES))
            tokens += int(batch.ragged("responses").values.count_nonzero())  # reads every value that arrived
            plane.acknowledge(lease)
        return tokens

    def take(step: int) -> None:
        assert plane.take(Request("small", ["responses"], 1, step), timeout=60)

    def clear(step: int) -> None:
        plane.seal(step, timeout=60)
        plane.drop(step)

    return measure(sizes, put, get, take, clear)


def transferqueue_side(sizes: Sizes) -> dict[str, float]:
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=2**30)
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    client = tq.get_client()
    jagged = [
        {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, (values, offsets) in part.items()}
        for part in pieces(sizes)
    ]
    rows = sizes.samples // sizes.pieces

    def put(step: int) -> None:
        for part in jagged:
            client.put(data=TensorDict(part, batch_size=[rows]), partition_id=f"train_{step}")

    def get(step: int) -> int:
        tokens = 0
        for _ in jagged:
            meta = client.get_meta(list(DTYPES), batch_size=rows, partition_id=f"train_{step}", task_name="train")
            assert meta.size == rows
            data = client.get_data(meta)
            tokens += int(data["responses"].values().count_nonzero())
        return tokens

    def take(step: int) -> None:
        meta = client.get_meta(["responses"], batch_size=N, partition_id=f"train_{step}", task_name="small")
        assert meta.size == N

    def clear(step: int) -> None:
        client.clear_partition(f"train_{step}")

    return measure(sizes, put, get, take, clear)


def measure(
    sizes: Sizes,
    put: Callable[[int], None],
    get: Callable[[int], int],
    take: Callable[[int], None],
    clear: Callable[[int], None],
) -> dict[str, float]:
    parts = pieces(sizes)
    expected = sum(int(part["responses"][0].count_nonzero()) for part in parts)
    megabytes = nbytes(parts) / 1e6
    puts, gets, takes = [], [], []
    for step in range(sizes.repetitions):
        start = time.perf_counter()
        put(step)
        puts.append(time.perf_counter() - start)
        for _ in range(min(SMALL_TAKES, sizes.samples // N)):
            start = time.perf_counter()
            take(step)
            takes.append(time.perf_counter() - start)
        start = time.perf_counter()
        assert get(step) == expected
        gets.append(time.perf_counter() - start)
        clear(step)
    both = min(p + g for p, g in zip(puts, gets, strict=True))
    return {
        "megabytes": round(megabytes, 1),
        "put_mb_s": round(megabytes / min(puts), 1),
        "get_mb_s": round(megabytes / min(gets), 1),
        "put_get_mb_s": round(megabytes / both, 1),
        "take_ms": round(1e3 * statistics.median(takes), 3),
    }


def run(side: str, python: str, sizes: Sizes) -> dict[str, float]:
    """One side in a process of its own."""
    command = [python, os.path.abspath(__file__), "--side", side, *(f"--{k}={v}" for k, v in sizes._asdict().items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tq-python", help="interpreter of an environment with TransferQueue, to compare with")
    parser.add_argument("--json", help="write the result to this file too")
    parser.add_argument("--side", choices=["local", "ray", "transferqueue"], help="measure this one, here")
    for name, default in Sizes(10_000, 1_000, 10, 6)._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = Sizes(given.samples, given.tokens, given.pieces, given.repetitions)
    if given.side is not None:
        side = transferqueue_side(sizes) if given.side == "transferqueue" else tandem_side(given.side, sizes)
        print(json.dumps(side))
        return
    sides: dict[str, Any] = {side: run(side, sys.executable, sizes) for side in ("local", "ray")}
    if given.tq_python:
        peer = sides["transferqueue"] = run("transferqueue", given.tq_python, sizes)
        for side in ("local", "ray"):
            sides[side]["times_transferqueue"] = round(sides[side]["put_get_mb_s"] / peer["put_get_mb_s"], 1)
    for side, found in sides.items():
        print(f"{side:>14}: " + "  ".join(f"{name} {value:g}" for name, value in found.items()))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(sides, file, indent=1)


if __name__ == "__main__":
    main()
