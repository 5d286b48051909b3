from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "ray", "vllm", "sglang", "peft", "datasets")
TORCH_FREE = ("base", "config", "algorithms", "observe", "stages")
"""Layers that planning a run imports. ``observe`` registers the loggers, whose names the plan checks."""


def modules(layer: str) -> list[str]:
    files = (ROOT / "tandem" / layer).rglob("*.py")
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def heavy_ones_after(names: list[str]) -> list[str]:
    """Which heavy packages a process has once it has imported ``names``."""
    script = "\n".join(
        ["import sys", *(f"import {name}" for name in names), f"print(*(m for m in {HEAVY!r} if m in sys.modules))"]
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("layer", TORCH_FREE)
def test_a_layer_that_planning_needs_imports_nothing_heavy(layer: str) -> None:
    names = modules(layer)
    assert names
    assert heavy_ones_after(names) == []


def test_a_run_imports_what_adapters_need_only_where_there_are_some() -> None:
    """Each process of a run would start slower by a second."""
    assert set(heavy_ones_after(["tandem.control.entry", "tandem.session.build"])) <= {"torch", "transformers"}
