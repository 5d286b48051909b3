"""The simulated device keeps the rules of an accelerator, and its account is right."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.devices import sim


def test_a_device_refuses_tensors_of_the_host_and_of_its_neighbour() -> None:
    there = torch.ones(3, device="sim:1")
    for elsewhere in (torch.ones(3), torch.ones(3, device="sim:0")):
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device, found"):
            there + elsewhere
    assert float((there + torch.tensor(1.0)).sum()) == 6.0


def test_gradients_lie_where_their_tensors_do_and_are_those_of_the_cpu() -> None:
    layer, twin = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    twin.load_state_dict(layer.state_dict())
    weight, hidden = layer.weight, torch.randn(5, 4)
    layer.to("sim:2")
    layer(hidden.to("sim:2")).square().sum().backward()
    twin(hidden).square().sum().backward()
    assert weight is layer.weight
    assert weight.grad is not None and twin.weight.grad is not None
    assert str(weight.grad.device) == "sim:2"
    torch.testing.assert_close(weight.grad.cpu(), twin.weight.grad)


def test_memory_is_counted_once_for_all_views_and_given_back() -> None:
    gc.collect()
    account = sim.accounts[3]
    account.reset_peak()
    before = account.allocated
    there = torch.zeros(256, device="sim:3")
    views = [there[:8], there.view(16, 16)]
    assert account.allocated - before == 1024
    del there
    assert account.allocated - before == 1024
    del views
    assert account.allocated == before
    assert account.peak == before + 1024


def test_more_than_the_limit_is_refused_and_leaves_the_account_as_it_was() -> None:
    account = sim.accounts[4]
    account.limit = account.allocated + 100
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"sim:4 is out of memory: 0 of 100 bytes are taken, 400"):
            torch.zeros(100, device="sim:4")
        assert account.allocated == 0
        torch.zeros(25, device="sim:4")
    finally:
        account.limit = 1 << 62


def test_copies_are_logged_with_their_direction_and_size() -> None:
    here = torch.arange(6)
    with sim.accounts[1].watched() as copies:
        there = here.to("sim:1")
        there.cpu()
        bool(there.any())
        there.nonzero()
        there[torch.tensor([0, 2])] = 1
        there.to("sim:0")
        there + 1
    assert [(copy.direction, copy.size) for copy in copies] == [
        ("to_device", 48), ("to_host", 48), ("to_host", 1), ("to_host", 48), ("to_device", 16), ("between", 48),
    ]  # fmt: skip


def test_autocast_computes_products_in_its_dtype_as_on_cuda() -> None:
    layer = torch.nn.Linear(4, 4).to("sim:0")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 4, device="sim:0")).dtype == torch.bfloat16
