"""Images in a batch: one object for a group, whatever becomes of the rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.columns.images import Images
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.store import LocalStore
from tandem.dataflow.tickets import Ticket
from tandem.rollout.protocol import GroupRequest
from tandem.rollout.wire import Message, pack_request, unpack_request
from tests.images.tiny import picture


def batch(shown: list[Images | None]) -> DataProto:
    prompts = Ragged.from_rows([torch.arange(i + 1) for i in range(len(shown))])
    return DataProto({"prompts": prompts}, {"images": shown})


def test_an_image_says_how_many_patches_it_has() -> None:
    with pytest.raises(ContractError, match=r"are 4 patches, and there are 3"):
        Images(torch.zeros(3, 48), torch.tensor([[1, 2, 2]]))
    with pytest.raises(ContractError, match="expected pixels"):
        Images(torch.zeros(4), torch.tensor([[1, 2, 2]]))


@given(rows=st.lists(st.integers(0, 2), min_size=1, max_size=8), order=st.randoms(use_true_random=False))
def test_rows_of_a_group_share_their_images_through_every_choice_of_rows(rows: list[int], order: object) -> None:
    every = [picture((2, 2)), picture((2, 4), seed=1), None]
    whole = batch([every[row] for row in rows])
    chosen = [order.randrange(len(rows)) for _ in range(5)]  # type: ignore[attr-defined]
    taken = DataProto.concat([whole[chosen], whole.repeat(2), *whole.split(1)])
    expected = [*chosen, *(i for i in range(len(rows)) for _ in range(2)), *range(len(rows))]
    assert all(found is every[rows[i]] for found, i in zip(taken.non_tensor_batch["images"], expected, strict=True))


def test_a_saved_batch_holds_each_image_once(tmp_path: Path) -> None:
    shared, other = picture((4, 4)), picture((2, 2), seed=1)
    whole = batch([shared, shared, None, other, shared])
    whole.save(tmp_path)
    for loaded in (DataProto.load(tmp_path), DataProto.from_bytes(whole.to_bytes())):
        assert loaded.equals(whole)
        found = loaded.non_tensor_batch["images"]
        assert found[0] is found[1] is found[4] and found[2] is None
    once = len(batch([shared]).to_bytes())
    assert len(batch([shared] * 8).to_bytes()) < once + 1000
    assert not whole.equals(batch([shared, shared, None, picture((2, 2), seed=2), shared]))


def test_the_store_copies_no_pixel() -> None:
    shown = picture((4, 4))
    ledger = Ledger(1, 2, capacity=1, max_draws=1, produced_by="prompts", settled_by=("prompts",))
    store = LocalStore(ledger, lease_seconds=10.0)
    ticket = Ticket(0, 0, 0)
    store.put([ticket], batch([shown, shown]), timeout=1.0)
    assert all(found is shown for found in store.get([ticket], ["prompts", "images"]).non_tensor_batch["images"])


def test_a_request_brings_its_images_to_another_process() -> None:
    asked = GroupRequest("a", torch.tensor([1, 2]), (3, 4), images=picture((2, 4)))
    fields, tensors = pack_request(asked)
    assert unpack_request(Message("ask", fields, tensors)).images == asked.images
    fields, tensors = pack_request(GroupRequest("a", torch.tensor([1, 2]), (3, 4)))
    assert unpack_request(Message("ask", fields, tensors)).images is None
