"""Imports deferred to first use, so that planning a run costs no torch import."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A stand-in that imports ``name`` on the first attribute access.

    Use it where signatures must be readable without the heavy import::

        if TYPE_CHECKING:
            import torch
        else:
            torch = LazyModule("torch")
    """

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self.__name__), attribute)
