"""DataProto against the reference."""

from __future__ import annotations
