"""Waiting for whichever process says something first, or for a caller from another thread."""

from __future__ import annotations

import os
import selectors
from typing import Any


class Watch:
    """What a pool's one thread waits on: the channels of its processes, and ``wake``, which any thread may call.

    Example::

        watch.add(process.channel, process)
        for process in watch.wait(seconds):
            process.read()
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._woken, False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def add(self, channel: Any, owner: object) -> None:
        """Wait for ``channel``, a socket or a descriptor, too: ``owner`` is returned when it has something to read."""
        self._selector.register(channel, selectors.EVENT_READ, owner)

    def remove(self, channel: Any) -> None:
        """Wait for ``channel`` no longer."""
        self._selector.unregister(channel)

    def wait(self, seconds: float) -> list[Any]:
        """Return the owners of the channels that can be read, none after ``seconds`` or after a call of ``wake``."""
        owners = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                os.read(self._woken, 4096)
            else:
                owners.append(key.data)
        return owners

    def wake(self) -> None:
        """End a ``wait`` that goes on, or else the next one."""
        os.write(self._wakes, b"+")

    def close(self) -> None:
        """Give the descriptors back. Nobody may wait or wake any more."""
        self._selector.close()
        os.close(self._woken)
        os.close(self._wakes)
