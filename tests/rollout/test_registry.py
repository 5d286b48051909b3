"""Engines by name."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tandem.base.errors import TandemError, UnknownNameError
from tandem.rollout.capabilities import EngineCapabilities
from tandem.rollout.hf import HfEngine
from tandem.rollout.registry import capabilities_of, engines, find_engine, make_engine, register_engine
from tandem.rollout.spec import EngineSpec
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


def test_an_unknown_name_lists_the_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="hf"):
        find_engine("hff")


def test_a_users_engine_is_found_by_its_name() -> None:
    can = EngineCapabilities(weights=("own",))

    @register_engine("test_registry_engine", capabilities=can)
    def build(model: object, *, flavour: str = "plain") -> HfEngine:
        return HfEngine(lm())

    assert find_engine("test_registry_engine").signature.parameters["flavour"].default == "plain"
    assert "test_registry_engine" in engines
    with pytest.raises(TandemError, match="twice"):
        register_engine("test_registry_engine", capabilities=can)(build)
    assert capabilities_of("test_registry_engine") == can
    assert capabilities_of("nobody") is None


def test_a_factory_gets_the_settings_that_it_names() -> None:
    made: dict[str, object] = {}

    @register_engine("test_names_one", capabilities=EngineCapabilities(weights=("own",)))
    def names_one(model: object, *, max_num_seqs: int) -> HfEngine:
        made["one"] = max_num_seqs
        return HfEngine(lm())

    @register_engine("test_takes_all", capabilities=EngineCapabilities(weights=("own",)))
    def takes_all(model: object, **settings: object) -> HfEngine:
        made["all"] = set(settings)
        return HfEngine(lm())

    @register_engine("test_class", capabilities=EngineCapabilities(weights=("own",)))
    class Own(HfEngine):
        def __init__(self, model: object, version: int) -> None:
            super().__init__(lm(), version=version)

    spec = EngineSpec(model="m", max_num_seqs=7, version=3)
    for name in ("test_names_one", "test_takes_all"):
        make_engine(replace(spec, engine=name), lm(), shares_weights=False)
    assert made["one"] == 7
    assert {"shares_weights", "version", "exact", "dtype", "keep_kv", "adapter"} <= set(made["all"])  # type: ignore[call-overload]
    assert make_engine(replace(spec, engine="test_class"), lm(), shares_weights=False).version == 3


def test_a_factory_that_must_have_what_nothing_gives_is_refused_when_it_is_registered() -> None:
    can = EngineCapabilities(weights=("own",))
    with pytest.raises(TandemError, match=r"'test_odd': its factory must have 'flavour'.*max_num_seqs"):

        @register_engine("test_odd", capabilities=can)
        def odd(model: object, *, flavour: str) -> HfEngine:
            raise AssertionError

    with pytest.raises(TandemError, match="takes that as its first parameter"):

        @register_engine("test_odd", capabilities=can)
        def odder(*, version: int) -> HfEngine:
            raise AssertionError

    assert "test_odd" not in engines


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"weights": ()}, "weights is empty"),
        ({"weights": ("shared", "own"), "wants": "path"}, "no parameters in common"),
        ({"weights": ("own",), "versions": ">=1"}, "write the package"),
    ],
)
def test_capabilities_that_contradict_each_other_are_refused(declared: dict[str, Any], reason: str) -> None:
    with pytest.raises(TandemError, match=reason):
        EngineCapabilities(**declared)


def test_a_package_that_is_missing_or_of_another_version_is_named() -> None:
    def lacks(package: str, versions: str) -> str | None:
        return EngineCapabilities(weights=("own",), package=package, versions=versions).lacks_package()

    assert EngineCapabilities(weights=("own",)).lacks_package() is None
    assert lacks("torch", ">=1") is None
    assert lacks("no-such-package", ">=1") == "needs the package no-such-package>=1, which is not installed here"
    other_build = EngineCapabilities(weights=("own",), package="no-such-package", versions=">=1", builds=("torch",))
    assert other_build.lacks_package() is None
    wrong = lacks("torch", "<1")
    assert wrong is not None and re.fullmatch(r"needs the package torch<1, and [\d.]+\S* is installed here", wrong)
