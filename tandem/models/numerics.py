"""How this process computes: its number of threads, and the numerical mode that ``trainer.exact`` stands on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from tandem.base.errors import ConfigError, Problem
from tandem.base.exact_mode import SETTING, ask_for_exact_mode

_LINE = 16
"""Floats of 64 bytes, to which PyTorch aligns the tensors that it makes; what it reads from files lies anywhere."""


def prepare_process(*, threads: int | None, exact: bool) -> None:
    """Give this process its number of threads (None: PyTorch's choice) and, for ``exact``, the mode.

    Called in every process that computes, before its first product. Raises ``ConfigError`` where one came before, in
    another mode.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if exact:
        ask_for_exact_mode()
        _require_exact_mode()


def _require_exact_mode() -> None:
    """Require the exact mode. PyTorch says its own; that of MKL is seen by what it does."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        why = "PyTorch has computed with AVX-512 in this process before"
    elif not all(_equal_wherever_placed()):
        why = "products round by where tensors lie in memory, as MKL has computed in this process before"
    else:
        return
    setting = " ".join(f"{name}={value}" for name, value in SETTING.items())
    remedy = f"Start Python with {setting}, or let nothing compute before this; else write exact: false"
    raise ConfigError([Problem("trainer.exact", True, why, remedy)])


def _equal_wherever_placed() -> Iterator[bool]:
    """Yield whether some products are the same bits for tensors on and off a cache line; a few milliseconds."""
    noise = torch.Generator().manual_seed(0)
    for rows, width in product((1, 2, 9, 33), (64, 168)):
        hidden, weight = (torch.randn(count, width, generator=noise) for count in (rows, 64))
        results = [linear(placed(hidden, a), placed(weight, b)) for a, b in ((0, 0), (0, 4), (1, 0))]
        yield all(torch.equal(results[0], result) for result in results)
        heads = hidden.view(1, 1, rows, width)
        results = [
            scaled_dot_product_attention(placed(heads, a), heads, placed(heads, b), is_causal=True)
            for a, b in ((0, 0), (1, 4))
        ]
        yield torch.equal(*results)


def placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a dense copy of a float32 ``tensor`` that begins ``offset`` floats behind a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() + 2 * _LINE)
    first = -(room.data_ptr() // 4) % _LINE + offset
    return room[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)
