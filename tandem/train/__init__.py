"""Training: the engine behind ``TrainEngine``, objectives, schedules and checkpoints.

The package is called, too: ``tandem.train(config, ...)`` is ``tandem.cli.calls.train``, since both have this name.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Called(ModuleType):
    """A package that is a function of the public interface as well; what that needs is imported when it is called."""

    def __call__(self, *args: Any, **keys: Any) -> Any:
        return importlib.import_module("tandem.cli.calls").train(*args, **keys)


sys.modules[__name__].__class__ = _Called
