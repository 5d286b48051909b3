"""The tasks of the ``reasoning-gym`` package, for whoever asks their questions and for whoever scores the answers.

A question travels as its recipe, not with its metadata: the scorer builds the same question again from it. So it
survives any process boundary and any checkpoint as plain JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tandem.base.errors import DataError
from tandem.base.registry import near

RECIPE = "reasoning_gym"
"""The column, and the key of ``extra_info``, that holds a question's recipe and its index."""


def _package() -> Any:
    try:
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != "reasoning_gym":
            raise
        raise DataError("reasoning_gym tasks need the package reasoning-gym: pip install 'tandem-rl[tasks]'") from error


def check_recipe(dataset: str, recipe: Mapping[str, Any]) -> None:
    """Raise ``DataError`` for an unknown task or parameter, or where the package is missing."""
    known = _package().DATASETS
    if dataset not in known:
        raise DataError(f"unknown reasoning_gym dataset {dataset!r}: {near(dataset, known)}")
    fields = [field.name for field in dataclasses.fields(known[dataset][1])]
    for key in recipe:
        if key != "dataset" and key not in fields:
            raise DataError(f"reasoning_gym dataset {dataset!r} has no parameter {key!r}: {near(key, fields)}")
    try:
        json.dumps(recipe)
    except TypeError as error:
        raise DataError(f"reasoning_gym dataset {dataset!r}: parameters must be plain values ({error})") from error


@lru_cache(maxsize=32)
def create_task(recipe: str) -> Any:
    """Return the task of a JSON recipe: a sequence of questions that can score answers. Raises ``DataError``."""
    given = json.loads(recipe)
    dataset = given.pop("dataset")
    try:
        return _package().create_dataset(dataset, **given)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym dataset {dataset!r} refuses {given}: {error}") from error
