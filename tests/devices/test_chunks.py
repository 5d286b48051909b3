"""Logits come in chunks that fit the device: each chunk costs a pass over the head and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.models.head.logprobs import (
    CHUNK_ELEMENTS,
    MOST_ELEMENTS,
    Projection,
    chunk_on,
    sum_pi_squared,
    token_logprobs,
)
from tandem.models.head.projection import Head
from tests.devices import sim

ACCOUNT = sim.accounts[3]


@pytest.fixture
def limit() -> Iterator[None]:
    """Let the test set the memory of ``sim:3``."""
    before = ACCOUNT.limit
    yield
    ACCOUNT.limit = before


@pytest.mark.parametrize(
    ("gib", "elements"), [(1, CHUNK_ELEMENTS), (24, 24 * 2**30 // 512), (80, 80 * 2**30 // 512), (141, MOST_ELEMENTS)]
)
def test_a_larger_device_holds_more_logits(limit: None, gib: int, elements: int) -> None:
    ACCOUNT.limit = gib << 30
    assert chunk_on(torch.device("sim:3")) == elements
    assert chunk_on(torch.device("cpu")) == CHUNK_ELEMENTS


def test_many_logits_on_a_large_device_need_few_passes_over_the_head(
    limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants are made small, so that a test's logits are many: on the CPU 5 rows at once, on devices 19 and all."""
    monkeypatch.setattr("tandem.models.head.logprobs.CHUNK_ELEMENTS", 50)
    plain, rows = Projection.logits, list[int]()

    def counted(self: Projection, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return plain(self, hidden, *rest)

    monkeypatch.setattr(Projection, "logits", counted)
    noise = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 4, generator=noise), torch.randn(10, 4, generator=noise)
    found = []
    for memory, device, passes in ((0, "cpu", [8, 16]), (100_000, "sim:3", [3, 6]), (1 << 62, "sim:3", [1, 1])):
        ACCOUNT.limit = memory
        head = Head(weight.clone().to(device).requires_grad_())
        states, targets = hidden.to(device), (torch.arange(40) % 10).to(device)
        counts = [squares_of(states, head, rows)]
        logprobs, _ = token_logprobs(states, head, targets)
        logprobs.sum().backward()
        assert [counts[0][0], len(rows)] == passes
        rows.clear()
        assert head.weight.grad is not None
        found.append([x.detach().cpu() for x in (logprobs, counts[0][1], head.weight.grad)])
    for other in found[1:]:
        for value, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(value, expected)


def squares_of(states: torch.Tensor, head: Head, rows: list[int]) -> tuple[int, torch.Tensor]:
    """The number of passes over the head, and what they gave."""
    squares = sum_pi_squared(states, head)
    passes = len(rows)
    rows.clear()
    return passes, squares
