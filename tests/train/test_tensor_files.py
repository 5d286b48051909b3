"""Parts of tensors are found again, however they were cut when they were written and are cut now."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.train import tensor_files
from tandem.train.tensor_files import Part, read_tensors, write_tensors

CUTS = st.lists(st.integers(0, 7), max_size=3)


def blocks(rows: list[int], columns: list[int]) -> list[Part]:
    """7 x 7 cut at these rows and columns."""
    edges = [sorted({0, 7, *cuts}) for cuts in (rows, columns)]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [Part((a, c), (b - a, d - c)) for a, b in spans[0] for c, d in spans[1]]


@given(CUTS, CUTS, CUTS, CUTS)
def test_what_overlaps_makes_up_the_whole(a: list[int], b: list[int], c: list[int], d: list[int]) -> None:
    whole = torch.arange(49).reshape(7, 7)

    def of(part: Part) -> torch.Tensor:
        return whole[tuple(slice(at, at + size) for at, size in zip(part.offset, part.size, strict=True))]

    for wanted in blocks(a, b):
        found, count = torch.full(wanted.size, -1), 0
        for stored in blocks(c, d):
            both = wanted.overlap(stored)
            if both is not None:
                found[both[0]] = of(stored)[both[1]]
                count += found[both[0]].numel()
        assert torch.equal(found, of(wanted))
        assert count == found.numel()


def test_many_files_hold_what_one_is_too_small_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 100)
    shared = torch.randn(5)
    saved: dict[str, Any] = {
        "a": {"w": torch.randn(7, 3), "none": torch.zeros(0, 4), "count": torch.tensor(3.0)},
        "shared": shared,
        "again": shared,
        "half": torch.randn(6).bfloat16(),
        "view": torch.randn(4, 6).T,
        "facts": {"lr": 0.1, "betas": (0.9, 0.95), "name": "x", "empty": None},
    }
    files = write_tensors(tmp_path, saved, 0, 1)
    assert len([file for file in files if file.suffix == ".safetensors"]) > 2
    zeros: dict[str, Any] = {
        name: torch.zeros_like(value) for name, value in saved.items() if isinstance(value, torch.Tensor)
    }
    zeros["a"] = {name: torch.zeros_like(value) for name, value in saved["a"].items()}
    zeros["facts"] = dict.fromkeys(saved["facts"])
    read_tensors(tmp_path, zeros)
    assert zeros["facts"] == saved["facts"]
    for name in ("shared", "again", "half", "view"):
        assert torch.equal(zeros[name], saved[name])
    assert all(torch.equal(zeros["a"][name], saved["a"][name]) for name in saved["a"])


def test_what_neither_json_nor_a_tensor_file_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="a set, which JSON can't hold"):
        write_tensors(tmp_path, {"a": {1, 2}}, 0, 1)
