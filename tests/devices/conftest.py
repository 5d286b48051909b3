"""Simulated devices for the tests of this folder; nothing of them is left for other tests of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.devices import sim
from tests.e2e.conftest import task

__all__ = ["task"]

torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    """Parameters stay the objects that they are when a module goes to a device, for this test."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    for account in sim.accounts:
        account.copies.clear()
        account.reset_peak()
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)
