"""A running run is asked by whoever may read its folder, and everybody else gets a word at once."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import DataError, DeadlineError
from tandem.base.run_folder import CONTROL_FILE, begin, owned
from tandem.observe.about import note_begin, note_end
from tandem.observe.status import channel
from tandem.observe.status.channel import ask, control_channel
from tests.observe.test_about import begun, gone

ANSWER = {"step": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    begin(tmp_path)
    return tmp_path


def address(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONTROL_FILE).read_text())
    return found


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def answered(folder: Path) -> bool:
    with suppress(DataError):
        return ask(folder, "status") == ANSWER
    return False


@contextmanager
def left_behind(folder: Path, **changes: Any) -> Iterator[None]:
    """The control address of a run that was killed, in a folder that is otherwise as it left it."""
    note_begin(folder, None)
    with control_channel(folder, {}):
        text = json.dumps(address(folder) | changes)
    (folder / CONTROL_FILE).write_text(text)
    yield


def test_a_running_run_answers_and_leaves_nothing_behind(folder: Path) -> None:
    with control_channel(folder, {"status": lambda: ANSWER}):
        assert ask(folder, "status") == ANSWER
        assert (folder / CONTROL_FILE).stat().st_mode & 0o777 == 0o600
    assert not (folder / CONTROL_FILE).exists()


def test_it_listens_on_this_machine_alone(folder: Path) -> None:
    with control_channel(folder, {"status": lambda: ANSWER}), socket.socket() as other:
        other.settimeout(1.0)
        with pytest.raises(OSError, match=r"refused|unreachable"):
            other.connect(("127.0.0.2", address(folder)["port"]))


@pytest.mark.parametrize(
    "line", [b'{"token": "guessed", "ask": "status"}\n', b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"\n"]
)
def test_whoever_has_no_token_gets_no_byte(folder: Path, line: bytes) -> None:
    with control_channel(folder, {"status": lambda: ANSWER}):
        with socket.create_connection(("127.0.0.1", address(folder)["port"]), 5.0) as stranger:
            stranger.sendall(line)
            assert stranger.recv(1) == b""
        assert ask(folder, "status") == ANSWER


def test_whoever_says_nothing_in_time_or_comes_in_crowds_is_let_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_LISTEN_S", 0.2)
    monkeypatch.setattr(channel, "_MOST_AT_A_TIME", 2)
    with control_channel(folder, {"status": lambda: ANSWER}), ExitStack() as stack:
        where = ("127.0.0.1", address(folder)["port"])
        crowd = [stack.enter_context(socket.create_connection(where, 5.0)) for _ in range(4)]
        assert [stranger.recv(1) for stranger in crowd] == [b""] * 4
        until(lambda: answered(folder))


def test_what_it_does_not_know_and_what_goes_wrong_are_answers_too(folder: Path) -> None:
    def fails() -> Mapping[str, Any]:
        raise ValueError("https://me:hunter2@host/ is away")

    with control_channel(folder, {"status": fails}):
        with pytest.raises(DataError, match=r"doesn't know 'stop'; it can be asked \['status'\]"):
            ask(folder, "stop")
        with pytest.raises(DataError, match=r"ValueError: .* is away") as error:
            ask(folder, "status")
    assert "hunter2" not in str(error.value)


def test_a_run_that_does_not_answer_is_named_after_the_deadline(folder: Path) -> None:
    over = threading.Event()

    def hangs() -> Mapping[str, Any]:
        over.wait(60.0)
        return ANSWER

    with control_channel(folder, {"status": hangs}), ExitStack() as stack:
        stack.callback(over.set)
        with pytest.raises(DeadlineError, match=r"waited 0\.2 s for an answer of process \d+ on .*, which is there"):
            ask(folder, "status", seconds=0.2)


def test_an_answer_that_trickles_ends_with_the_deadline(folder: Path) -> None:
    """Each byte comes in time, and the whole never does."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                while not over.wait(0.05):
                    connection.send(b" ")

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        with left_behind(folder, port=server.getsockname()[1]), pytest.raises(DeadlineError):
            ask(folder, "status", seconds=0.3)
        over.set()
        thread.join(5.0)


def test_a_dead_runs_address_is_known_for_what_it_is(folder: Path) -> None:
    with left_behind(folder, pid=gone()), pytest.raises(DataError, match=r"the run has died: process .* is gone"):
        ask(folder, "status")


def test_the_number_of_a_dead_runs_process_may_be_anothers(folder: Path) -> None:
    with left_behind(folder), pytest.raises(DataError, match=r"the run has ended or died: process .* isn't it"):
        ask(folder, "status")


def test_so_may_its_port(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    begin(other)
    with (
        control_channel(other, {"status": lambda: ANSWER}),
        left_behind(folder, port=address(other)["port"]),
        pytest.raises(DataError, match="the run has ended or died: at its port is no answer"),
    ):
        ask(folder, "status")


def test_a_run_elsewhere_is_not_looked_for_here(folder: Path) -> None:
    with left_behind(folder, host="far"), pytest.raises(DataError, match="ask on that machine"):
        ask(folder, "status")


def test_without_an_address_it_is_said_how_the_run_stands(folder: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        ask(folder / "absent", "status")
    with pytest.raises(DataError, match="nothing can be asked here: it left no note"):
        ask(folder, "status")
    with owned(folder), pytest.raises(DataError, match=r"no control address: process \d+ .* is starting or ending"):
        ask(folder, "status")
    note_begin(folder, None)
    note_end(folder, None)
    with pytest.raises(DataError, match="the run is over: finished"):
        ask(folder, "status")
    begun(folder, pid=gone())
    with pytest.raises(DataError, match="the run is over: died"):
        ask(folder, "status")


def test_who_owns_the_folder_next_removes_what_a_dead_run_left(folder: Path) -> None:
    with left_behind(folder), owned(folder):
        assert not (folder / CONTROL_FILE).exists()


def test_a_run_that_cannot_be_asked_goes_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = False
    with control_channel(folder / "absent", {}):
        done = True
    assert done and "nobody can ask this run" in caplog.text
