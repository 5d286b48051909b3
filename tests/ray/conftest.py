"""One Ray cluster for all tests here. Without the package they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("ray")

from tandem.runtime.ray.cluster import connect, disconnect
from tests.warm.start import warm_workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes of Ray can be chosen or left out: ``-m 'not ray'``."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """As a run starts it on this machine, but for the seconds that each of its workers imports."""
    os.environ.pop("RAY_ADDRESS", None)
    with warm_workers():
        assert connect()
    yield
    disconnect()
