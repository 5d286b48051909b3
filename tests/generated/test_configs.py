"""A plan is a promise: what it accepts runs to its end, and what it refuses it refuses by the name of a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generated.configs import accepted, draw, fault_of
from tests.generated.world import make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("seed", range(30))
def test_what_the_plan_accepts_runs_and_what_it_refuses_names_its_key(world: Path, seed: int) -> None:
    drawn, _ = accepted(draw(world, seed))
    assert fault_of(drawn, world) is None, drawn.words
