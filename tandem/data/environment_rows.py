"""The rows that an environment of the package verifiers brings, as a data source. Needs the extra ``verifiers``."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tandem.base.environments import read_rows
from tandem.data.base_source import BaseDataSource


class VerifiersRows(BaseDataSource):
    """The dataset of the environment ``env``, loaded with ``args``, and the one that it evaluates on.

    Columns: ``prompt`` (messages), ``answer``, and ``verifiers`` (the environment's own row, which its episode needs:
    pass it on in ``extra_info``).
    """

    def __init__(self, *, env: str, args: dict[str, Any] | None = None) -> None:
        self._env, self._args = env, args or {}

    @cached_property
    def _rows(self) -> dict[str, list[dict[str, Any]]]:
        return read_rows(self._env, self._args)

    def get_train_dataset(self) -> list[dict[str, Any]]:
        """Return the environment's rows; those that it evaluates on where it has no others."""
        return self._rows["train"] if "train" in self._rows else self._rows["eval"]

    def get_val_dataset(self) -> list[dict[str, Any]] | None:
        """Return the rows that the environment evaluates on; None where it has none of their own."""
        return self._rows["eval"] if "train" in self._rows and "eval" in self._rows else None


SOURCES: dict[str, type[BaseDataSource]] = {"verifiers": VerifiersRows}
"""Data sources that need no file, by the names that a config gives them."""
