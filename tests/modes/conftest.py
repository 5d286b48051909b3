"""The end-to-end task, for runs in every mode."""

from __future__ import annotations

from tests.e2e.conftest import task

__all__ = ["task"]
