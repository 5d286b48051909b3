"""What balancing does to the ranks' shares: tokens of the fullest rank / mean over ranks, without and with it.

Lognormal lengths (sigma 1), as samples of a run have them; each row is the mean and the worst of several batches. A
batch in which one sample alone exceeds the mean of the ranks can't be even and is drawn again. Also what dealing costs.
Run: ``python bench/balance.py``.
"""

from __future__ import annotations

import time
from statistics import fmean

import torch

from tandem.train.shard_batch import shard_rows

SHAPES = [(2, 32), (4, 32), (8, 32), (8, 128), (32, 32), (64, 32), (128, 64), (1024, 100)]
"""(ranks, samples a rank)."""


def main() -> None:
    print("| ranks | samples a rank | without | with balance, mean | worst | dealing |\n" + "|---" * 6 + "|")
    for ranks, per_rank in SHAPES:
        batches = 3 if ranks > 100 else 10
        plain, even, seconds = zip(*(measure(ranks, per_rank, seed) for seed in range(batches)), strict=True)
        cells = [f"{ranks}", f"{per_rank}", f"{fmean(plain):.3f}", f"{fmean(even):.4f}", f"{max(even):.4f}"]
        print(f"| {' | '.join(cells)} | {1000 * fmean(seconds):.1f} ms |", flush=True)


def measure(ranks: int, per_rank: int, seed: int) -> tuple[float, float, float]:
    """max / mean without and with balance, and the processor seconds of the latter."""
    lengths = lognormal(ranks, per_rank, torch.Generator().manual_seed(seed))
    started = time.process_time()
    even = shard_rows(lengths, ranks, balance=True)
    seconds = time.process_time() - started
    return unevenness(lengths, shard_rows(lengths, ranks, balance=False)), unevenness(lengths, even), seconds


def lognormal(ranks: int, per_rank: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths (ranks x per_rank,) around 200 tokens, none longer than the mean of the ranks."""
    while True:
        lengths = (200 * torch.randn(ranks * per_rank, generator=generator).exp()).long().clamp(min=1)
        if int(lengths.max()) * ranks <= int(lengths.sum()):
            return lengths


def unevenness(lengths: torch.Tensor, parts: list[torch.Tensor]) -> float:
    """Tokens of the fullest rank / mean over ranks."""
    sums = torch.stack([lengths[rows].sum() for rows in parts]).double()
    return float(sums.max() / sums.mean())


if __name__ == "__main__":
    main()
