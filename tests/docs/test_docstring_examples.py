"""The examples in docstrings run, and what is called with more than two arguments has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch

import tandem
from tandem import algorithms
from tandem.algorithms import ADVANTAGES, DISTILLATIONS, POLICY_LOSSES, PREFERENCE_LOSSES
from tandem.base.registry import Registry
from tandem.columns.schema import declare_column
from tandem.reward.registry import register_reward
from tandem.rollout.registry import register_engine

RUN = [f"tandem.algorithms.{found.name}" for found in pkgutil.iter_modules(algorithms.__path__)]
RUN += ["tandem.columns.proto", "tandem.columns.schema", "tandem.config.load", "tandem.reward.registry"]
REGISTERING = [declare_column, register_engine, register_reward]


@pytest.mark.parametrize("name", RUN)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    for found in doctest.DocTestFinder(recurse=True).find(module, globs={**vars(module), "torch": torch}):
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found)
        assert result.failed == 0, found.name


@pytest.mark.parametrize("registry", [ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, DISTILLATIONS])
def test_every_estimator_and_loss_shows_a_call(registry: Registry[Any]) -> None:
    for name in registry.names():
        target = registry[name].target
        if target.__module__.startswith("tandem."):
            assert f"{target.__name__}(" in (inspect.getdoc(target) or ""), name


@pytest.mark.parametrize("name", tandem.__all__)
def test_what_is_exported_and_takes_more_than_two_arguments_shows_a_call(name: str) -> None:
    exported = getattr(tandem, name)
    if len(inspect.signature(exported).parameters) > 2 and not inspect.isclass(exported):
        assert f"{name}(" in (inspect.getdoc(exported) or "")


@pytest.mark.parametrize("register", REGISTERING)
def test_what_registers_shows_a_call(register: Any) -> None:
    assert f"{register.__name__}(" in (inspect.getdoc(register) or "")
