"""Counting devices before anything starts: pure, without Ray."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigError
from tandem.runtime.ray.cluster import Slot
from tandem.runtime.ray.devices import CPU, GPU, SLOT, Inventory, Share, require_devices


def shares(**sizes: tuple[int, int]) -> list[Share]:
    return [Share(name, (name,), nodes, per_node) for name, (nodes, per_node) in sizes.items()]


def there(*devices: int, free: int | None = None, kind: str = GPU) -> Inventory:
    nodes = {f"10.0.0.{i}": count for i, count in enumerate(devices)}
    return Inventory(kind, nodes, sum(devices) if free is None else free)


@pytest.mark.parametrize(
    ("wanted", "cluster", "words"),
    [
        (shares(actor=(1, 4), rollout=(1, 4)), there(4), ["need 8 GPUs", "has 4 GPUs: 4 on 10.0.0.0", "4 missing"]),
        (shares(actor=(1, 2)), there(1), ["actor 1 x 2 need 2 GPUs", "1 GPU:", "1 missing"]),
        (shares(actor=(1, 4)), there(2, 2), ["actor 1 x 4 needs 4 GPUs on one node", "2 on 10.0.0.0, 2 on 10.0.0.1"]),
        (shares(actor=(1, 4)), there(3, free=1), ["has 3 GPUs: 3 on 10.0.0.0, 2 of them taken by others", "1 missing"]),
        (shares(actor=(1, 1)), there(kind=CPU), ["0 CPUs: no node", "1 missing"]),
        (shares(actor=(1, 9)), there(8, kind=SLOT), ["9 CPU slots", "(4 per core)", "RAY_ADDRESS=auto"]),
    ],
)
def test_what_is_there_and_what_is_missing_is_said(wanted: list[Share], cluster: Inventory, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        require_devices(wanted, cluster)
    assert caught.value.problems[0].key == "execution.resource"
    for word in words:
        assert word in str(caught.value)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
    st.lists(st.integers(0, 8), max_size=5),
)
def test_separate_groups_need_the_sum(sizes: list[tuple[int, int]], nodes: list[int]) -> None:
    wanted = shares(**{f"role{i}": size for i, size in enumerate(sizes)})
    needed, total = sum(n * per for n, per in sizes), sum(nodes)
    if needed > total or max(per for _, per in sizes) > max(nodes, default=0):
        with pytest.raises(ConfigError, match="missing" if needed > total else "on one node"):
            require_devices(wanted, there(*nodes))
    else:
        require_devices(wanted, there(*nodes))


def test_gpus_count_where_there_are_any_else_slots_else_cpus() -> None:
    nodes = {"a": {"CPU": 8.0, "tandem_slot": 32.0}, "b": {"CPU": 8.0, "GPU": 2.0}}
    assert Inventory.of(nodes, {"GPU": 1.0}) == Inventory(GPU, {"a": 0, "b": 2}, 1)
    assert Inventory.of({"a": nodes["a"]}, {"tandem_slot": 31.5}) == Inventory(SLOT, {"a": 32}, 31)
    assert Inventory.of({"a": {"CPU": 8.0}}, {}) == Inventory(CPU, {"a": 8}, 0)


def test_gpus_are_left_to_others_where_models_compute_on_the_cpu() -> None:
    nodes = {"a": {"CPU": 8.0, "GPU": 2.0}}
    assert Inventory.of(nodes, {"CPU": 8.0}, "cpu") == Inventory(CPU, {"a": 8}, 8)
    assert Inventory.of(nodes, {"GPU": 2.0}, "cuda") == Inventory(GPU, {"a": 2}, 2)


def test_an_actor_is_told_the_device_that_is_reserved_for_it() -> None:
    assert Slot(None, 1, GPU, 3).device("auto") == "cuda"
    assert Slot(None, 1, SLOT, 3).device("auto") == "cpu"
    assert Slot(None, 1, SLOT, 3).device("sim") == "sim:3"
    with pytest.raises(ConfigError, match="counts no GPU that could be reserved"):
        Slot(None, 1, SLOT, 3).device("cuda")
