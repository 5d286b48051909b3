"""What switching weight tags costs: against one plain ``copy_`` of as many bytes.

A forward under another tag backs the actor up, copies the tag in, and the actor back: three copies of all weights. The
yardstick copies one flat tensor of as many bytes three times. Both in turn, medians of wall seconds, and the results
compared bit by bit. Run: ``python bench/weight_tags.py [--megabytes 512] [--tensors 200] [--device cpu]``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tandem.models.fingerprint import fingerprint
from tandem.weights.store import WeightStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    each = args.megabytes * 10**6 // 4 // args.tensors
    live = {f"layer_{i}": torch.randn(each, device=args.device) for i in range(args.tensors)}
    store = WeightStore(live)
    store.save("ref")
    reference = fingerprint(live.items())
    for tensor in live.values():
        tensor.add_(1.0)
    actor = fingerprint(live.items())
    flat = torch.cat(list(live.values()))
    target = torch.empty_like(flat)

    def switch() -> None:
        with store.using("ref"):
            pass

    def copy() -> None:
        for _ in range(3):
            target.copy_(flat)

    seconds: dict[str, list[float]] = {"switch": [], "copy": []}
    for call in (switch, copy):  # memory is touched for the first time
        call()
    for _ in range(args.rounds):
        seconds["switch"].append(timed(switch, args.device))
        seconds["copy"].append(timed(copy, args.device))
    with store.using("ref"):
        assert fingerprint(live.items()) == reference
    assert fingerprint(live.items()) == actor
    switched, copied = median(seconds["switch"]), median(seconds["copy"])
    rate = 3 * flat.nbytes / 1e9
    print(f"{flat.nbytes / 1e6:.0f} MB in {args.tensors} tensors on {args.device}")
    print(f"switch there and back  {switched * 1000:7.1f} ms  {rate / switched:6.2f} GB/s")
    print(f"copy_ of as many bytes {copied * 1000:7.1f} ms  {rate / copied:6.2f} GB/s")
    print(f"ratio {switched / copied:.2f}")


def timed(call: Callable[[], None], device: str) -> float:
    """Seconds on the clock until the device is done."""
    started = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
