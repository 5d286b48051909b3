"""The calculator's episode as an environment of the package verifiers: the third way."""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from datasets import Dataset

TURNS = 3


def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


def right(completion: Any, answer: str) -> float:
    """1 for the right sum."""
    return float(completion[-1].content == answer)


def load_environment(rows: int = 1000, seed: int = 0) -> vf.Environment:
    """Three-digit sums, and a tool that adds."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(rows)]
    table = [{"prompt": [{"role": "user", "content": f"{x}+{y}="}], "answer": str(x + y)} for x, y in pairs]
    return vf.ToolEnv(dataset=Dataset.from_list(table), tools=[add], max_turns=TURNS, rubric=vf.Rubric(funcs=[right]))
