"""Procedural tasks of the ``reasoning-gym`` package: prompts without files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tandem.base.procedural import RECIPE, check_recipe, create_task
from tandem.data.rows import Row, RowError


class TaskTable:
    """``size`` questions of the task ``dataset``, made from ``seed``; further ``parameters`` are the task's own.

    Columns: ``question``, ``answer``, and ``reasoning_gym`` (the recipe that the reward ``reasoning_gym`` needs:
    pass it on in ``extra_info``). Raises ``DataError`` if the package is missing, or for an unknown task or parameter.
    """

    def __init__(self, *, dataset: str, size: int = 1000, seed: int = 0, **parameters: Any) -> None:
        self.name = dataset
        self._recipe = {"dataset": dataset, "size": size, "seed": seed, **parameters}
        check_recipe(dataset, self._recipe)
        self._made = create_task(json.dumps(self._recipe))

    def scan(self) -> Iterator[Row | RowError]:
        """Yield every question of the task as a row, in the order of the task."""
        for number in range(1, len(self._made) + 1):
            yield self.row(number)

    def row(self, number: int) -> Row:
        """Return question ``number``, counted from 1."""
        entry = self._made[number - 1]
        recipe = {"index": number - 1, "recipe": self._recipe}
        return Row(self.name, number, {"question": entry["question"], "answer": entry["answer"], RECIPE: recipe})
