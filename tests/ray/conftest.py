"""One Ray cluster for all tests here. Without the package they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes of Ray can be chosen or left out: ``-m 'not ray'``."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Two real cores, eight device slots, as the program would start it here."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**28)
    yield
    ray.shutdown()
