"""Weights cut into buckets over any number of senders, and put together again: the same names, in order, bit by bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.models.fingerprint import fingerprint, joined
from tandem.transport.buckets import Bucket, pack, pieces, places_of
from tandem.transport.outbox import Outbox

Pairs = list[tuple[str, torch.Tensor]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def weights(draw: st.DrawFn) -> Pairs:
    found = []
    for i in range(draw(st.integers(0, 9))):
        shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
        noise = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        tensor = torch.randn(shape, generator=noise).mul(100).to(dtype)
        transposed = draw(st.booleans()) and tensor.dim() > 1
        found.append((f"layer.{i}", tensor.transpose(0, 1) if transposed else tensor))
    return found


def same(some: Pairs, others: Pairs) -> bool:
    """Equal names, dtypes, shapes and bits, in the same order."""
    return len(some) == len(others) and all(
        a == b and x.dtype == y.dtype and x.shape == y.shape and bits(x) == bits(y)
        for (a, x), (b, y) in zip(some, others, strict=True)
    )


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


@given(pairs=weights())
def test_a_bucket_gives_back_what_was_packed(pairs: Pairs) -> None:
    bucket = pack(pairs)
    arrived = Bucket(places_of(bucket.label()), bucket.data.clone())
    assert same(list(arrived.pairs()), pairs)


@given(size=st.integers(0, 100), most=st.integers(1, 30))
def test_pieces_are_all_of_the_data_in_order_and_share_its_memory(size: int, most: int) -> None:
    data = torch.zeros(size, dtype=torch.uint8)
    parts = list(pieces(data, most))
    assert all(0 < part.numel() <= most for part in parts)
    for i, part in enumerate(parts):
        part.fill_(i % 256)
    assert sum(part.numel() for part in parts) == size
    assert data.tolist() == [i % 256 for i, part in enumerate(parts) for _ in range(part.numel())]


@given(rounds=st.lists(weights(), min_size=1, max_size=3), senders=st.integers(1, 4), bucket_bytes=st.integers(1, 300))
def test_what_several_senders_keep_is_all_of_it_and_no_two_keep_the_same(
    rounds: list[Pairs], senders: int, bucket_bytes: int
) -> None:
    """Over several snapshots, each in the memory of the one before."""
    boxes = [Outbox(i, senders, torch.device("cpu")) for i in range(senders)]
    for number, pairs in enumerate(rounds):
        for box in boxes:
            box.open(number)
            box.fill(iter(pairs), bucket_bytes)
            box.end()
        kept = [list(box.buckets(number, 1.0)) for box in boxes]
        counts = [len(buckets) for buckets in kept]
        assert max(counts) - min(counts) <= 1
        merged = [kept[i % senders][i // senders] for i in range(sum(counts))]
        assert same([pair for bucket in merged for pair in bucket.pairs()], pairs)
        assert joined(*(box.fingerprint(number, 1.0)[0] for box in boxes)) == fingerprint(pairs)
        assert sum(box.fingerprint(number, 1.0)[1] for box in boxes) == sum(tensor.nbytes for _, tensor in pairs)


@given(pairs=weights())
def test_a_snapshot_stays_as_it_was_while_the_weights_change(pairs: Pairs) -> None:
    box = Outbox(0, 1, torch.device("cpu"))
    before = [(name, tensor.clone()) for name, tensor in pairs]
    box.open(1)
    box.fill(iter(pairs), 64)
    box.end()
    for _, tensor in pairs:
        tensor.zero_()
    assert same([pair for bucket in box.buckets(1, 1.0) for pair in bucket.pairs()], before)
