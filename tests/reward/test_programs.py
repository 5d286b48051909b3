"""Programs against tests, and what a program can't do to the machine that runs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError, RewardError
from tandem.reward.sandbox import run as sandbox_module
from tandem.reward.sandbox.run import Ending, Isolation, Sandbox
from tandem.reward.sandbox.walls import NO_WALLS
from tandem.reward.scorers.programs import code, find_program, read_tests, same_output
from tests.reward.test_pool import alive, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="closed by the Linux kernel")

SEALED = Sandbox("full", seconds=10.0, memory_mb=256, output_kb=16)

NOTHING = (Ending.FAILED, "")


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("secret")
    return path


def test_every_isolation_holds_on_this_machine() -> None:
    for isolation in ("full", "network", "limits"):
        Sandbox(isolation).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "ending", "output"),
    [
        ("print(int(input()) * 2)", Ending.DONE, "42\n"),
        ("import sys; print('a', end=''); sys.exit()", Ending.DONE, "a"),
        ("import os, sys; print('a'); sys.stdout.flush(); os._exit(0)", Ending.DONE, "a\n"),
        ("if __name__ == '__main__': print(__name__)", Ending.DONE, "__main__\n"),
        ("import sys; print(sys.argv, sys.orig_argv)", Ending.DONE, "['program.py'] ['program.py']\n"),
        ("import ctypes; print(ctypes.CDLL(None).inotify_init1(0))", Ending.DONE, "-1\n"),
        ("import threading as t; x = t.Thread(target=print, args=('a',)); x.start(); x.join()", Ending.DONE, "a\n"),
        ("import heapq, decimal, random, sqlite3; print(len({'a', 'b'}))", Ending.DONE, "2\n"),
        ("import sys; sys.exit(3)", *NOTHING),
        ("1 / 0", *NOTHING),
        ("def f(: pass", *NOTHING),
        ("a\0b", *NOTHING),
        ("(" * 100_000, *NOTHING),
        ("def f(): f()\nf()", *NOTHING),
        ("x = [0] * 10**9", *NOTHING),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", *NOTHING),
        ("while True: print('x' * 1000)", Ending.FLOODED, None),
        ("import threading as t, time\nwhile 1: t.Thread(target=time.sleep, args=(9,), daemon=True).start()", *NOTHING),
        ("import os; os.abort()", *NOTHING),
        ("import os, signal; os.kill(os.getpid(), 9)", *NOTHING),
    ],
)
def test_how_programs_end(program: str, ending: Ending, output: str | None) -> None:
    ended = SEALED.run(program, "21\n")
    assert ended.ending is ending
    if output is not None:
        assert ended.output == output
    assert len(ended.output) <= 16 << 10


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)", "input()\nwhile True: pass"])
def test_a_program_that_does_not_end_is_ended(program: str) -> None:
    assert Sandbox(seconds=0.5).run(program, "\n").ending is Ending.LATE


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', {port}))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}')",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {{}})",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); p.join()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.killpg(0, 9)",
        "import os; os.setsid()",
        "import os; os.setuid(os.getuid())",
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "open({victim!r}).read()",
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "import os; open(f'/proc/{{os.getppid()}}/environ').read()",
        "import os; os.listdir('/')",
        "import os; os.unlink({victim!r})",
        "import os; os.truncate({victim!r}, 0)",
        "import os; os.chmod({victim!r}, 0)",
        "import os; os.utime({victim!r}, (0, 0))",
        "import os; os.rename({victim!r}, {victim!r} + '2')",
        "import shutil; shutil.rmtree({folder!r})",
        "open('notes', 'w')",
        "import os; os.mkdir('notes')",
        "open('tests.py').read()",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    ],
)
def test_what_reaches_out_fails(attempt: str, victim: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = SEALED.run(attempt.format(victim=str(victim), folder=str(victim.parent), port=port) + "\nprint(1)", "")
    assert ended.ending is Ending.FAILED
    assert ended.output == ""
    assert victim.read_text() == "secret"
    assert victim.stat().st_mode & 0o600


def test_a_program_sees_no_variables_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert "secret" not in SEALED.run("import os; print(os.environ)", "").output
    Sandbox("limits").run("open('left', 'w').write('x')", "")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_trusted_program_can_be_written() -> None:
    assert Sandbox("limits").run("open('a', 'w').write('x'); print(open('a').read())", "").output == "x\n"


def test_children_of_a_trusted_program_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import subprocess as s\nopen({str(note)!r}, 'w').write(str(s.Popen(['sleep', '60']).pid))"
    Sandbox("limits", seconds=1.0).run(program, "")
    assert until(lambda: not alive(int(note.read_text())), 10)


def test_a_program_does_not_outlive_its_scorer(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    owner = f"from tandem.reward.sandbox.run import Sandbox\nSandbox('limits', seconds=60.0).run({program!r}, '')"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", owner], env=environment)
    try:
        assert until(lambda: note.exists() and bool(note.read_text()))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert until(lambda: not alive(int(note.read_text())), 10)


def test_a_machine_without_the_doors_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = sandbox_module._INSIDE.read_text()
    inside = tmp_path / "inside.py"
    monkeypatch.setattr(sandbox_module, "_INSIDE", inside)
    monkeypatch.setattr(sandbox_module, "_walls", lambda isolation: NO_WALLS)
    inside.write_text(
        source.replace("_LANDLOCK_RESTRICT, _PATH_BENEATH = 444,", "_LANDLOCK_RESTRICT, _PATH_BENEATH = 99_999,")
    )
    with pytest.raises(RewardError, match=r"kernel gives no Landlock.* Write isolation: network"):
        Sandbox("full").check()
    inside.write_text(source.replace("        _close_files(libc, doors)", "        pass"))
    with pytest.raises(RewardError, match=r"open.* was not refused"):
        Sandbox("full").check()
    inside.write_text(source.replace("    _close_calls(libc, doors.calls or [])\n\n", "\n"))
    with pytest.raises(RewardError, match=r"socket.* was not refused"):
        Sandbox("network").check()


# --- the scorer -------------------------------------------------------------------------------------------------------

DOUBLE = "print(2 * int(input()))"
ADD = "def add(a, b):\n    return a + b"
IN_OUT = {"inputs": ["1\n", "2"], "outputs": ["2", "4\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        (DOUBLE, IN_OUT, 1.0),
        ("print(2)", IN_OUT, 0.5),
        ("print(3)", IN_OUT, 0.0),
        (ADD, CALLS, 1.0),
        ("class Solution:\n    add = lambda self, a, b: a + b", CALLS, 1.0),
        ("def add(a, b): return a + b if a == 1 else None", CALLS, 0.5),
        ("def sub(a, b): return 0", CALLS, 0.0),
        ("def add(a, b): return object()", CALLS, 0.0),
        (ADD, {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, 1.0),
        (ADD, {"fn_name": "add", "inputs": [["1", "2"]], "outputs": ["12"]}, 1.0),
        (ADD, {"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[[1, 2]]]}, 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (ADD, "def check(f):\n    assert f(1, 2) == 3\ncheck(add)", 1.0),
        ("import os; os._exit(0)", "assert False", 0.0),
        ("raise SystemExit(0)", ["assert True"], 0.0),
        ("def f(x): return str(x)", {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": ["[1, 2]"]}, 1.0),
        ("def f(x): return x", {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": ["[1, 2]"]}, 0.0),
        ("def f(x): return str(x)", {"fn_name": "f", "inputs": ["[1, 2]"], "outputs": ["[1, 2]"]}, 0.0),
        ("def f(x): return x", {"fn_name": "f", "inputs": ["[1, 2]"], "outputs": ["[1, 2]"]}, 1.0),
        ("def f(x): return x", {"fn_name": "f", "inputs": ['"[1]"'], "outputs": ['"[1]"']}, 1.0),
        ("def f(x): return str(x)", {"fn_name": "f", "inputs": ["7", [{}]], "outputs": ["7", "{}"]}, 0.5),
        ("def f(x): return x == 3", {"fn_name": "f", "inputs": [[3], [3], [3]], "outputs": [1, True, [1]]}, 1 / 3),
        ("def f(x): return [{'a': x}]", {"fn_name": "f", "inputs": [[1], [True]], "outputs": [[{"a": 1.0}]] * 2}, 0.5),
        ("print('[1, 2]'); exit()", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 2]]}, 0.0),
    ],
)
def test_programs_are_scored_by_their_tests(program: str, tests: object, passed: float) -> None:
    assert code(fenced(program), tests, partial=True) == {"score": passed, "passed": passed}
    assert code(fenced(program), tests)["score"] == float(passed == 1.0)


def test_tests_are_read_as_data_files_give_them() -> None:
    array = np.array(["1", "2"], dtype=object)
    many = [
        IN_OUT,
        '{"inputs": ["1", "2"], "outputs": ["2", "4"]}',
        {"inputs": array, "outputs": np.array(["2", "4"], dtype=object)},
        {"inputs": '["1", "2"]', "outputs": '["2", "4"]'},
        {"inputs": [["1"], ["2"]], "outputs": [["2"], ["4"]]},
    ]
    for tests in many:
        assert code(fenced(DOUBLE), tests)["score"] == 1.0
    nested = {"fn_name": "f", "inputs": [np.array([np.array([1, 2]), "a"], dtype=object)], "outputs": [np.array([3])]}
    assert read_tests(nested)[0][1:3] == ([[1, 2], "a"], [3])
    for deep in ("[" * 100_000, {"fn_name": "f", "inputs": ["[" * 100_000], "outputs": ["1"]}):
        with pytest.raises(DataError, match=r"nested too deeply|is no JSON"):
            read_tests(deep)
    for wrong in (None, "", [], {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, [1], 7):
        with pytest.raises(DataError, match="has no tests"):
            read_tests(wrong)


def test_time_is_shared_by_the_tests_of_an_answer() -> None:
    endless = {"inputs": ["1"] * 50, "outputs": ["2"] * 50}
    scores = code(fenced("while True: pass"), endless, partial=True, seconds=0.4, total_s=0.8)
    assert scores == {"score": 0.0, "passed": 0.0}


def test_an_answer_without_a_program_gets_nothing() -> None:
    assert code("no code", IN_OUT)["score"] == 0.0
    assert code(f"```python\n{DOUBLE}", IN_OUT)["score"] == 0.0
    assert code(DOUBLE, IN_OUT, fenced=False)["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\n```python3\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\nprints\n```\n7\n```", "a\n"),
        ("```python\ns = '```'\nb\n```", "s = '```'\nb\n"),
        ("```python\ns = '''\n    ```\n    '''\n```", "s = '''\n    ```\n    '''\n"),
        ("- so\n  ```python\n  a\n  ```\n", "  a\n"),
        ("```python\na```", "a"),
        ("```python\na```\nand\n```python\nb\n```", "b\n"),
        ("one ``` here: ``` \n```python\na\n```", "a\n"),
        ("```cpp\na\n```", None),
        ("```python\na", None),
        ("", None),
    ],
)
def test_the_program_of_an_answer(text: str, program: str | None) -> None:
    assert find_program(text) == program


@given(st.text(alphabet="`python\n ", max_size=200))
def test_looking_for_a_program_never_raises(text: str) -> None:
    found = find_program(text)
    assert found is None or found in text


@given(st.lists(st.text(alphabet="ab 1", max_size=5), max_size=5))
def test_blanks_at_line_ends_are_no_difference(lines: list[str]) -> None:
    assert same_output("\n".join(lines), " \n".join(lines) + "\n\n")
    assert not same_output("\n".join(lines) + "x", "\n".join(lines) + "y")


def test_isolations_are_those_of_the_plan() -> None:
    from tandem.reward.resolve import problems

    assert problems("code", None, {"isolation": "full", "partial": True}) == []
    assert set(Isolation.__args__) == {"full", "network", "limits"}  # type: ignore[attr-defined]
