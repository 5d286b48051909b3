"""How this process computes: its threads, and the numerical mode on which ``trainer.exact`` stands.

The products of MKL may round differently where a tensor happens to lie at another address, and kernels for AVX-512 were
seen to do so between two runs of equal operations. ``exact`` therefore holds only in a mode in which bits depend on
values and shapes alone, and every process that computes has to be in it before its first product.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from itertools import product

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from tandem.base.errors import ConfigError, Problem

MODE = {"MKL_CBWR": "AVX2,STRICT", "ATEN_CPU_CAPABILITY": "avx2"}
"""What the environment must say before the first product. MKL reads it then, PyTorch at its first kernel."""

_LINE = 16  # floats of a cache line, to which PyTorch aligns its own tensors


def settle(*, threads: int | None, exact: bool) -> None:
    """Give this process its number of threads (None: PyTorch's choice) and, for ``exact``, the mode.

    Child processes inherit both. Raises ``ConfigError`` where products came before and fixed another mode.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if exact:
        _ask()
        _require()


def _ask() -> None:
    os.environ["MKL_CBWR"] = MODE["MKL_CBWR"]
    wide = os.environ.get("ATEN_CPU_CAPABILITY") in (None, "avx512")
    if wide and platform.machine().lower() in ("x86_64", "amd64"):
        os.environ["ATEN_CPU_CAPABILITY"] = MODE["ATEN_CPU_CAPABILITY"]


def _require() -> None:
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        why = "PyTorch computes with AVX-512 here since before the config was read"
    elif not all(_placed_alike()):
        why = "the products of this process round by where tensors lie in memory"
    else:
        return
    setting = " ".join(f"{name}={value}" for name, value in MODE.items())
    remedy = f"Start Python with {setting}, let nothing compute before Tandem starts, or write exact: false"
    raise ConfigError([Problem("trainer.exact", True, why, remedy)])


def _placed_alike() -> Iterator[bool]:
    """Whether products of one row and of several are the same bits for tensors on and off a cache line."""
    noise = torch.Generator().manual_seed(0)
    for rows, width in product((1, 2, 9, 33), (64, 168)):
        hidden, weight = (torch.randn(n, width, generator=noise) for n in (rows, 64))
        aligned = linear(placed(hidden, 0), placed(weight, 0))
        yield all(torch.equal(aligned, linear(placed(hidden, a), placed(weight, b))) for a, b in ((0, 4), (1, 0)))
        query = hidden.view(1, 1, rows, width)
        attended = scaled_dot_product_attention(placed(query, 0), query, placed(query, 0), is_causal=True)
        moved = scaled_dot_product_attention(placed(query, 1), query, placed(query, 4), is_causal=True)
        yield torch.equal(attended, moved)


def placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A dense copy of ``tensor``, float32, that begins ``offset`` floats behind a cache line."""
    room = torch.empty(tensor.numel() + 2 * _LINE)
    first = -(room.data_ptr() // room.element_size()) % _LINE + offset
    return room[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)
