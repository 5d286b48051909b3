"""The bench of the data plane runs, on small sizes; what it measures is no test's business."""

from __future__ import annotations

from bench import data_plane


def test_the_bench_of_the_data_plane_runs() -> None:
    found = data_plane.tandem_side("local", data_plane.Sizes(samples=64, tokens=20, pieces=4, repetitions=2))
    assert found.keys() == {"megabytes", "put_mb_s", "get_mb_s", "put_get_mb_s", "take_ms"}
    assert all(value > 0 for name, value in found.items() if name != "megabytes")
