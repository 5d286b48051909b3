"""Engines by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.base.errors import TandemError, UnknownNameError
from tandem.rollout.hf import HfEngine
from tandem.rollout.registry import LATER, engines, find_engine, register_engine
from tests.rollout.tiny_models import lm


def test_the_plan_may_read_it_without_torch() -> None:
    code = (
        "import sys, tandem.rollout.registry as r\n"
        "assert 'hf' in r.engines and 'max_num_seqs' in r.engines['hf'].signature.parameters\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hf_is_built_with_its_parameters() -> None:
    engine = find_engine("hf").target(lm(), shares_weights=True, version=3, max_num_seqs=4)
    assert isinstance(engine, HfEngine)
    assert engine.version == 3


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_known_name_that_comes_later_says_so_in_one_line(name: str) -> None:
    assert name in LATER
    with pytest.raises(TandemError, match="later") as caught:
        find_engine(name)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_the_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="hf"):
        find_engine("hff")


def test_a_users_engine_is_found_by_its_name() -> None:
    @register_engine("test_registry_engine")
    def build(model: object, *, flavour: str = "plain") -> HfEngine:
        return HfEngine(lm())

    assert find_engine("test_registry_engine").signature.parameters["flavour"].default == "plain"
    assert "test_registry_engine" in engines
    with pytest.raises(TandemError, match="twice"):
        register_engine("test_registry_engine")(build)
