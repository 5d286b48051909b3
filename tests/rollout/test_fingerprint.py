"""The fingerprint tells any two sets of weights apart, and only that."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.models.fingerprint import fingerprint


def some(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (12,), "c": (5, 1, 2), "d": ()}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


@given(seed=st.integers(0, 50))
def test_order_and_strides_do_not_matter(seed: int) -> None:
    pairs = some()
    shuffled = [(name, w.t().contiguous().t() if w.ndim == 2 else w.clone()) for name, w in pairs]
    random.Random(seed).shuffle(shuffled)
    assert fingerprint(shuffled) == fingerprint(pairs)


@given(tensor=st.integers(0, 3), place=st.integers(0, 11), bit=st.integers(0, 31))
def test_every_bit_matters(tensor: int, place: int, bit: int) -> None:
    pairs = some()
    flat = pairs[tensor][1].reshape(-1).view(torch.int32)
    flat[place % len(flat)] ^= 1 << bit if bit < 31 else -(2**31)
    assert fingerprint(pairs) != fingerprint(some())


@given(first=st.integers(0, 11), second=st.integers(0, 11))
def test_values_that_change_places_matter(first: int, second: int) -> None:
    pairs = some()
    flat = pairs[1][1]
    flat[[first, second]] = flat[[second, first]]
    assert (fingerprint(pairs) == fingerprint(some())) == (first == second)


def test_names_shapes_and_dtypes_matter() -> None:
    zero = torch.zeros(4)
    prints = {
        fingerprint([("a", zero)]),
        fingerprint([("b", zero)]),
        fingerprint([("a", zero.view(2, 2))]),
        fingerprint([("a", torch.zeros(4, dtype=torch.int32))]),
        fingerprint([("a", torch.zeros(4, dtype=torch.bfloat16))]),
        fingerprint([("a", zero), ("b", zero)]),
        fingerprint([]),
    }
    assert len(prints) == 7


def test_it_does_not_depend_on_how_a_long_tensor_is_cut() -> None:
    long = torch.arange(2**20 + 5, dtype=torch.int32)
    changed = long.clone()
    changed[2**20 + 1] += 1
    assert fingerprint([("a", long)]) == fingerprint([("a", long.clone())])
    assert fingerprint([("a", long)]) != fingerprint([("a", changed)])
    swapped = long.clone()
    swapped[[1, 2**20 + 1]] = swapped[[2**20 + 1, 1]]
    assert fingerprint([("a", long)]) != fingerprint([("a", swapped)])


def test_bfloat16_is_read_bit_by_bit() -> None:
    a = torch.randn(100, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert fingerprint([("a", a)]) != fingerprint([("a", -a)])
    assert fingerprint([("a", a)]) == fingerprint([("a", a.clone())])
