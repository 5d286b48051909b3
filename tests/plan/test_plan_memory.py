"""Estimated memory: from what the model's files say, and only from that."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

from tandem.topology.plan import Plan

Plans = Callable[..., Plan]


def write_header(folder: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of which only the header is there: no reader of headers looks further."""
    header = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())


def test_memory_is_counted_from_the_headers_of_the_weights(place: Path, plan_of: Plans) -> None:
    assert plan_of().memory == ()
    write_header(place / "model", {"a": [100, 64], "b": [64]})
    (memory,) = plan_of().memory
    parameters = 100 * 64 + 64
    assert memory.parts["actor weights"] == 4 * parameters
    assert memory.parts["actor optimizer"] == 8 * parameters
    assert "rollout weights" not in memory.parts
    assert memory.parts["rollout KV cache"] == 2 * 4 * 2 * 2 * 16 * 32 * 256
    assert memory.total == sum(memory.parts.values())
    with_ref = plan_of("algorithm.kl.in=loss").memory[0]
    assert with_ref.total - memory.total == 4 * parameters


def test_memory_shrinks_with_devices_and_with_adapters(place: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"a": [1000, 640]})
    one, two = plan_of().memory[0], plan_of("execution.resource={actor: [1, 2]}").memory[0]
    assert two.parts["actor optimizer"] * 2 == one.parts["actor optimizer"]
    adapted = plan_of("actor_rollout_ref.model.lora_rank=1").memory[0]
    assert adapted.parts["actor optimizer"] < one.parts["actor optimizer"]
    assert adapted.parts["actor weights"] == one.parts["actor weights"]


def test_a_broken_weight_file_costs_the_estimate_and_nothing_else(place: Path, plan_of: Plans) -> None:
    (place / "model" / "model.safetensors").write_bytes(b"\xff" * 20)
    assert plan_of().memory == ()
    assert plan_of().problems == ()
