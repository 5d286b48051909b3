"""On a device that is too small for all rows at once, prompts wait: nothing runs out of memory."""

from __future__ import annotations

import gc

import pytest
import torch

from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import Sampling
from tests.devices import sim
from tests.rollout.tiny_models import lm, requests, tokens

ROOM = 300_000
"""Bytes beside the weights: keys and values of all rows of the test would take more."""


@pytest.mark.parametrize(("n", "exact"), [(1, False), (4, False), (4, True)])
def test_keys_and_values_take_a_part_of_what_the_device_has_left(
    n: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, sampling, asked = sim.accounts[3], Sampling(n=n, max_tokens=12), requests(24 // n, n)
    model = lm().to("sim:3")
    unbounded, bounded = (
        HfEngine(model, exact=exact, kv_cache_gib=gib, max_num_batched_tokens=24) for gib in (1.0, None)
    )
    gc.collect()
    monkeypatch.setattr(account, "limit", account.allocated + ROOM)
    with pytest.raises(torch.OutOfMemoryError, match="sim:3 is out of memory"):
        list(unbounded.generate(asked, sampling))
    gc.collect()
    there = tokens(list(bounded.generate(asked, sampling)))
    monkeypatch.undo()
    assert there == tokens(list(HfEngine(lm(), exact=exact).generate(asked, sampling)))
