"""Weights in memory that two processes see: the same bits, whatever their types, sizes and buckets."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import WriteError
from tandem.models.fingerprint import fingerprint
from tandem.models.shared_weights import Place, SharedWeights, map_weights

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


def tensors(shapes: list[tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"w{i}": (torch.randn(shape, generator=generator) * 50).abs().to(TYPES[(i + seed) % len(TYPES)])
        for i, shape in enumerate(shapes)
    }


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)


@given(
    shapes=SHAPES, bucket=st.sampled_from([1, 4096, 2**20]), seeds=st.lists(st.integers(0, 5), min_size=1, max_size=3)
)
def test_whoever_maps_it_sees_the_last_write_bit_by_bit(
    shapes: list[tuple[int, ...]], bucket: int, seeds: list[int]
) -> None:
    shared = SharedWeights(bucket)
    for seed in seeds:
        sent = tensors(shapes, seed)
        shared.write(sent.items())
        assert fingerprint(shared) == fingerprint(sent.items())
    places = [Place.from_json(place.to_json()) for place in shared.places]
    if any(t.numel() for t in sent.values()):
        assert fingerprint(map_weights(shared.fd, places)) == fingerprint(sent.items())
    assert sum(t.nbytes for _, t in shared) == sum(t.nbytes for t in sent.values())


def test_it_is_a_copy_and_a_second_write_takes_no_more_memory() -> None:
    shared, sent = SharedWeights(4096), tensors([(100, 30), (7,), (3000,)], 0)
    shared.write(sent.items())
    before, size = fingerprint(sent.items()), os.fstat(shared.fd).st_size
    for tensor in sent.values():
        tensor.zero_()
    assert fingerprint(shared) == before
    shared.write(sent.items())
    assert fingerprint(shared) == fingerprint(sent.items())
    assert os.fstat(shared.fd).st_size == size


def test_names_that_no_longer_come_are_gone_and_twice_is_once() -> None:
    shared = SharedWeights()
    shared.write({"a": torch.ones(3), "b": torch.ones(2)}.items())
    shared.write([("b", torch.zeros(2)), ("b", torch.full((2,), 5.0))])
    assert [(name, tensor.tolist()) for name, tensor in shared] == [("b", [5.0, 5.0])]


def test_floats_are_kept_as_the_type_that_was_asked_for() -> None:
    shared = SharedWeights()
    sent = {"w": torch.tensor([1.0, 1.0 + 2**-12]), "count": torch.tensor([3])}
    shared.write(sent.items(), torch.bfloat16)
    found = dict(shared)
    assert found["w"].dtype == torch.bfloat16 and found["count"].dtype == torch.int64
    assert torch.equal(found["w"], sent["w"].bfloat16())


READER = """
import sys
from tandem.base.errors import WriteError
from tandem.models.fingerprint import fingerprint
from tandem.models.shared_weights import Place, map_weights
import json
weights = map_weights(int(sys.argv[1]), [Place.from_json(p) for p in json.loads(sys.argv[2])])
print(fingerprint(weights))
"""


def test_another_process_reads_it() -> None:
    shared, sent = SharedWeights(), tensors([(10, 3), (5,), (64, 64)], 1)
    shared.write(sent.items())
    places = json.dumps([place.to_json() for place in shared.places])
    root = Path(__file__).parents[2]
    read = subprocess.run(
        [sys.executable, "-c", READER, str(shared.fd), places],
        pass_fds=[shared.fd],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert read.stdout.strip() == fingerprint(sent.items())


def test_memory_that_can_not_grow_is_told_as_such() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(WriteError, match=r"new weights are handed on can't grow to 4 MB .* \(ulimit -f\)"):
            SharedWeights(2**22).write({"w": torch.zeros(8)}.items())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
