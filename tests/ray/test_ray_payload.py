"""What travels arrives as it was; tensors beside the pickle, not inside it. Without a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.columns.proto import DataProto
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.remote.payload import pack, unpack
from tandem.roles.loss import policy_objective
from tandem.runtime.ray.roles import rank_engine, rank_setup

DTYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_tensors_of_any_dtype_shape_and_stride_arrive_as_they_were(
    made: list[tuple[torch.dtype, list[int], bool]],
) -> None:
    tensors = [torch.randint(0, 200, shape).to(dtype) for dtype, shape, _ in made]
    sent = [t.transpose(0, -1) if flip and t.ndim > 1 else t for t, (_, _, flip) in zip(tensors, made, strict=True)]
    for arrived in (unpack(pack({"nested": sent})), unpack(pack({"nested": sent}).copied())):
        for tensor, original in zip(arrived["nested"], sent, strict=True):
            assert tensor.dtype == original.dtype and tensor.shape == original.shape
            assert torch.equal(tensor, original)


def test_a_parameter_arrives_as_a_plain_tensor() -> None:
    (arrived,) = unpack(pack([torch.nn.Parameter(torch.ones(3))]))
    assert type(arrived) is torch.Tensor and not arrived.requires_grad


def test_the_bytes_of_a_batch_are_beside_the_pickle_and_shared_where_they_arrive() -> None:
    rows = [torch.arange(10_000), torch.arange(5)]
    batch = DataProto({"responses": rows, "rewards": torch.tensor([1.0, 2.0])}, {"uid": ["a", "b"]}, {"step": 3})
    packed = pack(batch)
    assert len(packed.head) < 2_000
    arrived = unpack(packed)
    assert arrived.equals(batch)
    memory = {buffer.ctypes.data for buffer in packed.buffers}
    assert arrived.ragged("responses").values.data_ptr() in memory
    assert not {buffer.ctypes.data for buffer in packed.copied().buffers} & memory


@pytest.mark.parametrize("example", ["examples/quickstart/grpo.yaml"])
def test_what_ranks_are_told_survives_the_way(example: str) -> None:
    config = load_words([str(Path(__file__).parents[2] / example)], Config)
    setup = rank_setup(config, partial(rank_engine, config, 7))
    arrived = unpack(pack(setup))
    assert arrived.build.args == setup.build.args and arrived.build.func is setup.build.func
    assert (arrived.device, arrived.seed, arrived.plugins) == (setup.device, setup.seed, setup.plugins)
    objective = policy_objective(config)
    assert unpack(pack(objective)) == objective
