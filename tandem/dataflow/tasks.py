"""Procedural tasks of the ``reasoning-gym`` package: prompts without files, and the scorer that comes with each.

A row carries the recipe of its question, not the question's metadata: the scorer builds the same question again from
it. So it survives any process boundary and any checkpoint as plain JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from tandem.base.errors import DataError
from tandem.base.registry import near
from tandem.dataflow.rows import Row, RowError

RECIPE = "reasoning_gym"


class TaskTable:
    """``size`` questions of the task ``dataset``, made from ``seed``; further ``parameters`` are the task's own.

    Columns: ``question``, ``answer``, and ``reasoning_gym`` (the recipe that ``score_answer`` needs: pass it on in
    ``extra_info``). Raises ``DataError`` if the package is missing, or for an unknown task or parameter.
    """

    def __init__(self, *, dataset: str, size: int = 1000, seed: int = 0, **parameters: Any) -> None:
        self.name = dataset
        self._recipe = {"dataset": dataset, "size": size, "seed": seed, **parameters}
        _check(dataset, self._recipe)
        self._made = _create(json.dumps(self._recipe))

    def scan(self) -> Iterator[Row | RowError]:
        """All questions in order."""
        for number in range(1, len(self._made) + 1):
            yield self.row(number)

    def row(self, number: int) -> Row:
        """Question ``number``, counted from 1."""
        entry = self._made[number - 1]
        recipe = {"index": number - 1, "recipe": self._recipe}
        return Row(self.name, number, {"question": entry["question"], "answer": entry["answer"], RECIPE: recipe})


def score_answer(response: str, extra_info: Mapping[str, Any], *, answer_tag: str | None = None) -> float:
    """The task's own score of ``response``, 0 to 1.

    ``extra_info["reasoning_gym"]`` is the recipe from the row. ``answer_tag``: score what stands in the last
    ``<tag>…</tag>`` (0 if there is none) instead of the whole response; blanks around it are taken off.
    """
    if RECIPE not in extra_info:
        raise DataError(f"extra_info has no {RECIPE!r}: this scorer is for prompts of a reasoning_gym source")
    task = _create(json.dumps(extra_info[RECIPE]["recipe"]))
    answer: str | None = response.strip()
    if answer_tag is not None:
        tag = re.escape(answer_tag)
        found = re.findall(f"<{tag}>(.*?)</{tag}>", response, re.DOTALL)
        answer = found[-1].strip() if found else None
    return float(task.score_answer(answer, task[extra_info[RECIPE]["index"]]))


def _package() -> Any:
    try:
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != "reasoning_gym":
            raise
        raise DataError("reasoning_gym tasks need the package reasoning-gym: pip install 'tandem-rl[tasks]'") from error


def _check(dataset: str, recipe: Mapping[str, Any]) -> None:
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
def _create(recipe: str) -> Any:
    given = json.loads(recipe)
    dataset = given.pop("dataset")
    try:
        return _package().create_dataset(dataset, **given)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym dataset {dataset!r} refuses {given}: {error}") from error
