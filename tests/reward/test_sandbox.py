"""The walls of the sandbox: which system calls a program may make, what it can't reach with them, what still runs."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.reward.sandbox import run as sandbox_module
from tandem.reward.sandbox.calls import ALLOWED
from tandem.reward.sandbox.run import Ending, Sandbox
from tandem.reward.sandbox.walls import NO_WALLS, Walls, candidates

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="closed by the Linux kernel")

CONDITIONAL = {56, 435, 62, 234, 302, 72, 16}  # judged by their arguments
SEALED = Sandbox("full", seconds=20.0, memory_mb=256, output_kb=64)


@functools.cache
def standing() -> list[Walls]:
    """The kinds of walls that this machine has; none at all is always among them."""
    return [walls for walls in candidates() if walls == NO_WALLS or SEALED._held(walls).result == "held"]


@pytest.fixture(params=["no walls", "namespaces", "bubblewrap"])
def walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Walls:
    """Each kind in turn: what a program can't do, it can't do without walls either."""
    kinds = {"no walls": NO_WALLS, "namespaces": None, "bubblewrap": None}
    for found in standing():
        if found.stand:
            kinds.update({"bubblewrap" if found.bubblewrap else "namespaces": found})
    chosen = kinds[request.param]
    if chosen is None:
        pytest.skip(f"this machine has no {request.param}")
    monkeypatch.setattr(sandbox_module, "_walls", lambda isolation: chosen)
    return chosen


# --- the kernel's own answers -----------------------------------------------------------------------------------------

SWEEP = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    print(number, result, ctypes.get_errno())
"""


def test_the_kernel_refuses_all_calls_that_are_not_listed(walls: Walls) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86_64")
    listed = {pair[0] for pair in ALLOWED.values()} | CONDITIONAL
    probes = {335, 336}  # the kernel's own return from a probe, which no filter sees: it ends a program that makes it
    numbers = [number for number in range(470) if number not in listed | probes]
    ended = SEALED.run(SWEEP.format(numbers=numbers), "")
    assert ended.ending is Ending.DONE
    answers = [tuple(map(int, line.split())) for line in ended.output.splitlines()]
    assert [number for number, _, _ in answers] == numbers
    assert {(result, error) for _, result, error in answers} == {(-1, errno.EPERM)}


CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]) != -1:
        print("done")
    elif ctypes.get_errno() != errno.EPERM:
        print("not refused:", errno.errorcode[ctypes.get_errno()])
"""
ATTACKS = {
    "a file system frozen": "call(16, -1, 0xC0045877, 0)",
    "the flags of an inode set": "call(16, -1, 0x40086602, 0)",
    "the attributes of an inode set": "call(16, -1, 0x401C5820, 0)",
    "a block device discarded": "call(16, -1, 0x1277, 0)",
    "text typed into a terminal": "call(16, -1, 0x5412, b'x')",
    "a signal's owner set": "call(72, -1, 8, 1)",
    "a lease taken": "call(72, -1, 1024, 1)",
    "a large pipe": "call(72, -1, 1031, 1 << 20)",
    "a segment of memory made": "call(29, 0, 4096, 0o1600)",
    "a segment of memory attached": "call(30, {segment}, 0, 0)",
    "a segment of memory removed": "call(31, {segment}, 0, 0)",
    "semaphores made": "call(64, 0, 1, 0o1600)",
    "a queue of messages made": "call(68, 0, 0o1600)",
    "a posix queue opened": "call(240, b'queue', 0o102, 0o600, 0)",
    "a mount picked": "call(433, -1, b'/', 0)",
    "a tree of mounts opened": "call(428, -1, b'/', 1)",
    "a file system opened": "call(430, b'tmpfs', 0)",
    "a mount made": "call(165, b'none', b'/', b'tmpfs', 0, 0)",
    "a mount's attributes set": "call(442, -1, b'/', 0, 0, 0)",
    "a file opened by its handle": "call(304, -1, 0, 0)",
    "a key added": "call(248, b'user', b'name', b'value', 5, -4)",
    "the session's keys searched": "call(250, 0, -3, 1)",
    "performance counted": "call(298, 0, -1, -1, -1, 0)",
    "a program loaded into the kernel": "call(321, 0, 0, 0)",
    "a ring of requests made": "call(425, 8, 0)",
    "a process traced": "call(101, 16, {pid}, 0, 0)",
    "a process's memory read": "call(310, {pid}, 0, 0, 0, 0, 0)",
    "a process's memory written": "call(311, {pid}, 0, 0, 0, 0, 0)",
    "a process held by descriptor": "call(434, {pid}, 0)",
    "a process signalled": "call(62, {pid}, 0)",
    "every process signalled": "call(62, -1, 0)",
    "its group signalled": "call(62, 0, 0)",
    "a thread signalled": "call(200, {pid}, 0)",
    "a signal with a value queued": "call(129, {pid}, 0, 0)",
    "page faults of its own handled": "call(323, 0)",
    "a file in memory made": "call(319, b'name', 0)",
    "a descriptor executed": "call(322, -1, b'', 0, 0, 0x1000)",
    "namespaces of its own": "call(272, 0x10000000)",
    "a process made with its own user namespace": "call(56, 0x10000011, 0, 0, 0, 0)",
    "an abstract socket": "call(41, 1, 1, 0)",
    "a pair of sockets": "call(53, 1, 1, 0, 0)",
    "more memory asked for": "call(302, 0, 9, b'\\xff' * 16, 0)",
    "its capabilities set": "call(126, b'\\x22\\x05\\x08\\x20' + bytes(4), bytes(24))",
    "another kernel started": "call(246, 0, 0, 0, 0)",
    "extended attributes set": "call(188, b'/', b'user.a', b'b', 1, 0)",
    "inode attributes set by path": "call(469, -1, b'/', 0, 0, 0)",
}


@pytest.fixture(scope="module")
def segment() -> Iterator[int]:
    """Of memory that another process shares: this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.shmget(0, 4096, 0o1600)
    assert made >= 0
    yield made
    libc.shmctl(made, 0, None)


def test_known_attacks_are_refused(walls: Walls, segment: int) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86_64")
    fields = {"segment": segment, "pid": os.getpid()}
    lines = [f"print({name!r}); " + attack.format(**fields) for name, attack in ATTACKS.items()]
    ended = SEALED.run(CALL + "\n".join(lines), "")
    assert ended.output.splitlines() == list(ATTACKS)
    assert ended.ending is Ending.DONE
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.shmctl(segment, 2, ctypes.create_string_buffer(256)) == 0  # still there


OBSERVED = """
import os
def tried(what):
    try:
        what()
    except OSError:
        return
    print("done")
for path in {secrets!r}:
    tried(lambda: open(path).read())
    tried(lambda: open(path, "a"))
    tried(lambda: os.listdir(path))
    tried(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY))
    tried(lambda: os.link(path, "here"))
    tried(lambda: os.symlink(path, "here"))
    tried(lambda: os.rename(path, path + "2"))
tried(lambda: os.open("/", os.O_TMPFILE | os.O_RDWR))
tried(lambda: os.mkfifo("pipe"))
tried(lambda: open("/dev/mem", "rb"))
tried(lambda: open("/sys/kernel/uevent_seqnum").read())
tried(lambda: open("/proc/sysrq-trigger", "w"))
print(open("/dev/null").read() == "", len(open("/dev/urandom", "rb").read(4)))
"""


def test_files_of_others_are_out_of_reach(walls: Walls, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    secrets = [str(tmp_path / "secret"), str(tmp_path), "/etc/shadow", "/etc/passwd", "/root", f"/proc/{os.getpid()}"]
    ended = SEALED.run(OBSERVED.format(secrets=secrets), "")
    assert (ended.ending, ended.output) == (Ending.DONE, "True 4\n")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_an_abstract_socket_of_another_process_gets_no_caller(walls: Walls) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0tandem-test-" + str(os.getpid()))
        server.listen()
        server.settimeout(0.2)
        program = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0tandem-test-{os.getpid()}')"
        assert SEALED.run(program, "").ending is Ending.FAILED
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_program_has_no_capabilities_and_ends_without_a_trace(walls: Walls) -> None:
    sets = Sandbox("network", seconds=20.0).run("print(open('/proc/self/status').read())", "").output
    found = {line.split(":")[0]: int(line.split(":")[1], 16) for line in sets.splitlines() if line.startswith("Cap")}
    assert found == {"CapInh": 0, "CapPrm": 0, "CapEff": 0, "CapBnd": found["CapBnd"], "CapAmb": 0}
    if os.geteuid() == 0:
        assert found["CapBnd"] == 0


def test_a_late_program_leaves_no_process(walls: Walls) -> None:
    """Also none that has ended and waits to be reaped by the machine's first process."""
    before = _processes()
    assert Sandbox(seconds=0.7).run("import time; time.sleep(60)", "").ending is Ending.LATE
    end = time.monotonic() + 10
    while (left := _processes() - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def _processes() -> set[str]:
    """Zombies, and Pythons that run the inside of a sandbox."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if (
                state == "Z" and (folder / "stat").read_text().split("(")[1].startswith(("python", "bwrap"))
            ) or b"sandbox/inside.py" in (folder / "cmdline").read_bytes():
                found.add(folder.name)
        except OSError:
            continue
    return found


# --- what still runs --------------------------------------------------------------------------------------------------

NORMAL = {
    "threads": """
from concurrent.futures import ThreadPoolExecutor
import queue, threading
with ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(abs, range(100))))
lock, ready = threading.Lock(), threading.Event()
timer = threading.Timer(0.01, ready.set); timer.start(); print(ready.wait(5)); timer.join()
""",
    "time and signals": """
import signal, time, random, datetime, zoneinfo
signal.signal(signal.SIGALRM, lambda *_: print("rung")); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1)
signal.raise_signal(signal.SIGALRM)
time.monotonic(); time.process_time(); datetime.datetime.now(zoneinfo.ZoneInfo("UTC")); random.SystemRandom().random()
""",
    "memory": """
import array, ctypes, mmap, sys
m = mmap.mmap(-1, 1 << 20); m[:3] = b"abc"; print(bytes(m[:3])); m.close()
print(len(bytearray(50 << 20)), ctypes.CDLL(None).abs(-3))
sys.setrecursionlimit(100000)
def f(n): return n and 1 + f(n - 1)
import threading
threading.stack_size(64 << 20)
t = threading.Thread(target=lambda: print(f(20000))); t.start(); t.join()
""",
    "the library": """
import bisect, collections, dataclasses, decimal, enum, fractions, functools, hashlib, heapq, itertools, json, math, os
import re, shutil, sqlite3, statistics, string, struct, subprocess, tempfile, textwrap, typing, unicodedata, zlib
import logging, platform, select, selectors, getpass, inspect, pdb, unittest, doctest, secrets, uuid, pickle, locale, io
print(os.cpu_count() > 0, shutil.get_terminal_size().columns, os.isatty(1), platform.system(), os.getcwd() != "")
c = sqlite3.connect(":memory:"); print(c.execute("select 1 + 1").fetchone(), hashlib.sha256(b"").hexdigest()[:4])
""",
    "input": """
import sys
print(sys.stdin.readline().strip(), input(), sys.stdin.read().split())
""",
}
SAID = {
    "threads": "4950\nTrue\n",
    "time and signals": "rung\nrung\n",
    "memory": "b'abc'\n52428800 3\n20000\n",
    "the library": "True 80 False Linux True\n(2,) e3b0\n",
    "input": "a b ['c', 'd']\n",
}


@pytest.mark.parametrize("name", NORMAL)
def test_normal_programs_run(walls: Walls, name: str) -> None:
    ended = SEALED.run(NORMAL[name], "a\nb\nc\nd\n")
    assert (ended.ending, ended.output) == (Ending.DONE, SAID[name])


TEMPORARY = """
import os, sqlite3, tempfile, shutil
with tempfile.NamedTemporaryFile("w+") as f:
    f.write("ab"); f.flush(); f.seek(0); print(f.read())
with tempfile.TemporaryFile() as f:
    f.write(b"c"); f.truncate(0)
with tempfile.TemporaryDirectory() as d:
    os.mkdir(d + "/x"); open(d + "/x/a", "w").write("1"); os.rename(d + "/x/a", d + "/b")
    shutil.copyfile(d + "/b", d + "/c")
    s = sqlite3.connect(d + "/s.db"); s.execute("create table t (a)"); s.execute("insert into t values (7)"); s.commit()
    print(s.execute("select a from t").fetchone(), sorted(os.listdir(d)))
print(os.listdir(tempfile.gettempdir()))
written = 0
try:
    for i in range(100):
        open(tempfile.gettempdir() + f"/{i}", "wb").write(bytes(1 << 20)); written += 1
except OSError:
    print(written <= 16)
"""


def test_temporary_files_can_be_written_and_are_bounded(walls: Walls) -> None:
    ended = SEALED.run(TEMPORARY, "")
    if walls.stand:
        assert ended.output == "ab\n(7,) ['b', 'c', 's.db', 'x']\n[]\nTrue\n"
    else:
        assert ended.ending is Ending.FAILED


def test_named_packages_can_be_imported_and_no_others(walls: Walls) -> None:
    program = "import numpy as np; print(np.linalg.solve(np.eye(9), np.ones(9)).sum(), np.random.rand() > 0)"
    with_numpy = Sandbox("full", seconds=30.0, memory_mb=1024, packages=("numpy",))
    with_numpy.check()
    assert with_numpy.run(program, "").output == "9.0 True\n"
    if sys.prefix != sys.base_prefix:  # else all packages lie among Python's own library
        assert with_numpy.run("import yaml", "").ending is Ending.FAILED
    assert SEALED.run(program, "").ending is Ending.FAILED


def test_programs_side_by_side_end_on_their_own(walls: Walls) -> None:
    outputs: dict[int, str] = {}

    def one(i: int) -> None:
        outputs[i] = SEALED.run(f"import time; time.sleep(0.05); print({i})", "").output

    threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {i: f"{i}\n" for i in range(6)}


def test_bubblewrap_is_taken_where_it_is_there_and_only_if_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    first = next(candidates())
    assert first.bubblewrap == str(broken)
    sandbox_module._walls.cache_clear()
    try:
        assert sandbox_module._walls("full").bubblewrap is None
        wrapper = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n'
        broken.write_text(wrapper)  # one that builds nothing, but works
        sandbox_module._walls.cache_clear()
        assert sandbox_module._walls("full") == first
    finally:
        sandbox_module._walls.cache_clear()
    assert subprocess.run([broken, "--", "true"], check=False).returncode == 0
