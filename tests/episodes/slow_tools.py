"""Tools of which some are slow or break."""

from __future__ import annotations

import asyncio
import time


def add(x: int, y: int = 1) -> int:
    """Add two numbers."""
    return x + y


def broken(x: int) -> int:
    """Always fail."""
    raise RuntimeError(f"no {x} today")


def stuck(x: int) -> int:
    """Take a long time."""
    time.sleep(1000)
    return x


async def later(x: int) -> int:
    """Take a moment."""
    await asyncio.sleep(0.05)
    return x


def pause(x: int) -> int:
    """Take longer than others need for all they do."""
    time.sleep(1.0)
    return x
