"""A storage unit beside a ledger that is told first: what may be taken can be got. No Ray needed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

from tandem.columns.proto import DataProto
from tandem.dataflow.group_storage import as_columns
from tandem.dataflow.progress import Outcome
from tandem.dataflow.ray import storage_unit as ray_unit
from tandem.dataflow.ray.controller import Written
from tandem.dataflow.ray.storage_unit import StorageUnit
from tandem.dataflow.tickets import Ticket
from tandem.remote.payload import pack, unpack


class SlowController:
    """Its ledger has counted a write long before the unit hears of it."""

    def __init__(self) -> None:
        self.counted, self.answer = asyncio.Event(), asyncio.Event()
        self.write = self

    async def remote(self, tickets: list[Ticket], columns: list[str]) -> Written:
        self.counted.set()
        await self.answer.wait()
        return Written((Outcome.STORED,) * len(tickets), (True,) * len(tickets), 1)


def test_what_the_ledger_has_lent_is_got_though_its_write_is_still_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_unit, "end_with_node", os.getpid)  # there is no node to end with
    ticket = Ticket(3, 20, 0)
    columns = as_columns([ticket], DataProto({"rewards": torch.tensor([0.5, 1.0])}), 2)

    async def meet() -> Any:
        controller = SlowController()
        unit = StorageUnit(controller, 2)
        put = asyncio.create_task(unit.put([ticket], pack(columns), 5.0))
        await controller.counted.wait()
        got = asyncio.create_task(unit.get([ticket], ["rewards"]))
        await asyncio.sleep(0)
        assert not got.done()
        controller.answer.set()
        await put
        return unpack(await got)

    assert asyncio.run(asyncio.wait_for(meet(), 10.0))["rewards"].tolist() == [0.5, 1.0]
