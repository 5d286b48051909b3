"""A fingerprint is taken where the weights are, in little more memory than they have."""

from __future__ import annotations

import gc

import pytest
import torch

from tandem.models import fingerprint
from tests.devices import sim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_fingerprint_takes_sixteen_bytes_an_element_and_leaves_the_weights_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, account = 1 << 12, sim.accounts[4]
    monkeypatch.setattr(fingerprint, "_CHUNK", chunk)
    here = (torch.randn(3 * chunk + 5, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    there = here.to("sim:4")
    gc.collect()
    account.reset_peak()
    before = account.allocated
    with account.watched() as copies:
        assert fingerprint.fingerprint([("w", there)]) == fingerprint.fingerprint([("w", here)])
    assert account.peak - before <= 16 * chunk + 64
    assert all(copy.size <= 8 for copy in copies if copy.direction == "to_host")
    assert torch.equal(there.cpu(), here)
