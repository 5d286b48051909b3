"""A process from the server is what a new interpreter would be, to whoever starts it and to itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.warm.start import ROOT

pytestmark = [
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes start as ever"),
]
COLD = {"PYTHONHASHSEED": "1"}
"""What an interpreter reads when it starts, so that the server can't give it."""

ABOUT = """
import json, os, sys
ids = os.getppid(), os.getpgid(0) in (os.getpid(), os.getppid()), os.getsid(0) == os.getpid()
print(json.dumps([sys.argv, sys.path, os.getcwd(), dict(os.environ), ids, sys.stdin.read(), __name__]))
print("torch" in sys.modules, file=sys.stderr)
sys.exit(3)
"""
MODULE = "import sys; print(__name__, sys.argv[1:], sys.path[0])"


def run(*words: str, env: dict[str, str] | None = None, **settings: Any) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run([sys.executable, *words], env=given, capture_output=True, text=True, **settings)


@pytest.mark.parametrize("session", [False, True])
def test_it_has_the_words_files_folder_environment_and_group_that_a_new_one_would_have(
    tmp_path: Path, session: bool
) -> None:
    settings: dict[str, Any] = {"input": "asked", "cwd": tmp_path, "start_new_session": session}
    warm = run("-c", ABOUT, "one", "--two", **settings)
    cold = run("-c", ABOUT, "one", "--two", env=COLD, **settings)
    assert (warm.stderr, cold.stderr) == ("True\n", "False\n")
    assert warm.returncode == cold.returncode == 3
    told, expected = json.loads(warm.stdout), json.loads(cold.stdout)
    assert expected[3].pop("PYTHONHASHSEED") == "1"
    assert told == expected
    assert told[4][0] == os.getpid()


@pytest.mark.parametrize("words", [("-m", "mine"), ("-P", "-c", MODULE), ("mine.py",), ("-c", "raise ValueError")])
def test_every_way_to_start_is_as_it_was(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    warm, cold = (run(*words, "a", cwd=tmp_path, env=env) for env in (None, COLD))
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_signals_end_it_and_it_is_collected_like_any_child(how: signal.Signals) -> None:
    code = "import time; print('here', flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        assert psutil.Process(process.pid).parent() == psutil.Process()
        process.send_signal(how)
        assert process.wait() == -how
    assert not psutil.pid_exists(process.pid)


def test_what_one_process_does_no_other_finds() -> None:
    assert run("-c", "import os, torch; torch.mine = os.environ['MINE'] = '1'").returncode == 0
    assert run("-c", "import os, torch; print(hasattr(torch, 'mine'), 'MINE' in os.environ)").stdout == "False False\n"
