"""Joining a cluster and reserving its devices, or saying within seconds why not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.base.errors import ConfigError, DeadlineError, TandemError
from tandem.runtime.ray.cluster import connect, inventory, release, reserve
from tandem.runtime.ray.devices import Share

ray = pytest.importorskip("ray")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Code in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.getcwd(), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:{port}", r"no Ray cluster answers at RAY_ADDRESS=127\.0\.0\.1:\d+: .*refused"),
        ("http://127.0.0.1:8265", r"ray job submit --address=http://127\.0\.0\.1:8265 -- python -m tandem train"),
    ],
)
def test_an_address_without_a_cluster_is_refused_in_seconds(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address.format(port=closed_port()))
    started = time.monotonic()
    with pytest.raises(TandemError, match=words):
        connect()
    assert time.monotonic() - started < 6


@pytest.mark.usefixtures("warm_python")
def test_a_run_joins_the_cluster_that_the_address_names(cluster: None) -> None:
    """As inside ``ray job submit``: devices are those of the cluster, which goes on afterwards."""
    code = (
        "from tandem.runtime.ray.cluster import connect, disconnect, inventory, reserve\n"
        "from tandem.runtime.ray.devices import Share\n"
        "assert not connect()\n"
        "assert len(reserve([Share('actor', ('actor',), 1, 2)])['actor']) == 2\n"
        "print(inventory().kind, inventory().total)\n"
        "disconnect()"
    )
    done = python(code, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    assert done.returncode == 0, done.stderr
    there = inventory()
    assert done.stdout.split() == [there.kind, str(there.total)]


@pytest.mark.ray
def test_ranks_of_roles_that_take_turns_have_a_gpu_each() -> None:
    """In a bundle of several devices Ray deals two halves of one to two ranks of a role."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ray.pretend_gpus"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    actor, rollout = (line.split() for line in done.stdout.splitlines()[-2:])
    assert sorted(actor) == ["0", "1", "2", "3"]
    assert actor == rollout


def test_without_ray_tandem_is_there_and_ray_is_asked_for_by_name() -> None:
    code = (
        "import sys\n"
        "sys.modules['ray'] = None\n"
        "import tandem.dataflow.ray.store, tandem.runtime.ray.processes\n"
        "from tandem.base.errors import TandemError\n"
        "try:\n"
        "    tandem.runtime.ray.processes.RayRuntime.start([])\n"
        "except TandemError as error:\n"
        "    print(error)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "pip install 'tandem-rl[ray]'" in done.stdout


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_too_few_devices_are_an_error_within_seconds(cluster: None) -> None:
    there, started = inventory(), time.monotonic()
    wanted = [Share("actor", ("actor",), 1, there.total), Share("rollout", ("rollout",), 1, 1)]
    with pytest.raises(ConfigError, match=rf"has {there.total} CPU slots .*: 1 missing"):
        reserve(wanted)
    assert time.monotonic() - started < 5


def test_devices_that_others_hold_are_not_waited_for_without_end(cluster: None) -> None:
    there = inventory()
    held = reserve([Share("actor", ("actor",), 1, there.total - 1)])
    started = time.monotonic()
    try:
        with pytest.raises(DeadlineError, match=rf"rollout 1 x 2; .* {there.total - 1} of them taken by others"):
            reserve([Share("rollout", ("rollout",), 1, 2)], timeout=1)
    finally:
        release(held)
    assert time.monotonic() - started < 10
    until(lambda: inventory().free == there.free)


def listening() -> dict[int, set[str]]:
    """Process -> the addresses (in hex, as the kernel has them) that this process and its descendants listen on."""
    sockets: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found: dict[int, set[str]] = {}
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor != os.getpid():
            continue
        with suppress(OSError):
            links = [os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()]
            if own := {sockets[link] for link in links if link in sockets}:
                found[pid] = own
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_a_cluster_of_one_machine_is_open_to_nobody_else(cluster: None) -> None:
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    found = listening()
    assert len(found) >= 2, "the cluster's own processes are seen"
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert {pid: addresses - loopback for pid, addresses in found.items() if addresses - loopback} == {}
