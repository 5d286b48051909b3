"""Images on Ray: through the store and the wire once a group, and trained by several ranks."""

from __future__ import annotations

import pickle

import pytest
import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.ray.store import RayStore
from tandem.dataflow.tickets import Ticket
from tandem.remote.payload import pack, unpack
from tests.images.tiny import picture


def group(copies: int, sides: tuple[int, int] = (8, 8)) -> DataProto:
    """Samples of one group, which share their images."""
    return DataProto(
        {"prompts": Ragged.from_rows([torch.arange(3)] * copies)}, {"images": [picture(sides, seed=copies)] * copies}
    )


def test_a_group_travels_with_one_image() -> None:
    one, many = (pack(dict(group(n).non_tensor_batch)) for n in (1, 8))
    assert len(one.buffers) == len(many.buffers) == 2  # pixels and grid
    assert len(many.head) < len(one.head) + 100
    found = unpack(many)["images"]
    assert all(images is found[0] for images in found) and found[0] == group(8).non_tensor_batch["images"][0]
    assert pickle.loads(pickle.dumps(found[0])) == found[0]


@pytest.mark.usefixtures("cluster")
def test_the_store_on_ray_holds_each_image_once() -> None:
    ledger = Ledger(2, 4, capacity=2, max_draws=1, produced_by="prompts", settled_by=("prompts",))
    store = RayStore.start(ledger, 60.0, 2)
    try:
        tickets = [Ticket(0, place, 0) for place in range(2)]
        data = DataProto.concat([group(4), group(4, (2, 4))])
        store.put(tickets, data, timeout=30.0)
        found = store.get(tickets, ["prompts", "images"]).non_tensor_batch["images"]
        assert found == data.non_tensor_batch["images"]
        assert [images is found[4 * (i // 4)] for i, images in enumerate(found)] == [True] * 8
    finally:
        store.close()
