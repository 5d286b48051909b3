"""How a running run is asked: a port on the loopback interface, named with a token in a file that only its owner reads.

A question and its answer are a line of JSON each, on a connection of their own::

    {"token": "…", "ask": "status"}
    {"answer": {…}}    or    {"error": "…"}

The file is removed with the end of the run. One that a killed run has left behind names a process that is gone, or a
port at which nobody knows its token.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.base.deadline import Deadline
from tandem.base.errors import DataError, DeadlineError
from tandem.base.hidden import hide
from tandem.base.machine import process_lives
from tandem.base.run_folder import CONTROL_FILE, owner
from tandem.observe.about import read_about, state_of

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
ANSWER_S = 10.0
"""Seconds that a run has for an answer, unless whoever asks says otherwise."""

_MOST_AT_A_TIME = 16
_LISTEN_S = 5.0  # for whoever has connected to say what it wants
_LOOK_S = 0.1  # between two looks at whether the channel is closed
_LONGEST_QUESTION = 1 << 16
_LONGEST_ANSWER = 1 << 26

Answers = Mapping[str, Callable[[], Mapping[str, Any]]]
"""What can be asked, and who answers it, in a thread of its own."""


@dataclass(frozen=True)
class _Address:
    """Where a run is asked: process ``pid`` on ``host`` listens at ``port`` for those who know its ``token``."""

    host: str
    pid: int
    port: int
    token: str


# --- the run ---------------------------------------------------------------------------------------------------------


@contextmanager
def control_channel(folder: Path, answers: Answers) -> Iterator[None]:
    """Answer whoever asks the run in ``folder``, as long as the block lasts. A run goes on where that can't be."""
    try:
        server = _Server(secrets.token_urlsafe(32), answers)
    except OSError as error:
        logger.warning("nobody can ask this run for its status (the run goes on): %s", error)
        yield
        return
    thread = threading.Thread(target=server.serve_forever, args=(_LOOK_S,), name="control-address", daemon=True)
    address = _Address(socket.gethostname(), os.getpid(), server.server_address[1], server.token)
    file = folder / CONTROL_FILE
    try:
        thread.start()
        try:
            _write(file, address)
        except OSError as error:
            logger.warning("nobody can ask this run for its status (the run goes on): %s", error)
        yield
    finally:
        with suppress(OSError):
            if _read(file) == address:
                file.unlink()
        server.shutdown()
        server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Answers those who know ``token``, each in a thread that keeps nothing from ending.

    Whoever else is on this machine may connect: so there are few at a time, and each has little time to say something.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, token: str, answers: Answers) -> None:
        super().__init__((LOOPBACK, 0), _Question)
        self.token, self.answers = token, answers
        self._places = threading.Semaphore(_MOST_AT_A_TIME)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for the connection, or let it go where there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve the connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Let a connection go that ended in the middle: there is nobody to tell."""


class _Question(socketserver.BaseRequestHandler):
    """One connection: a question, its answer, the end."""

    server: _Server
    request: socket.socket

    def handle(self) -> None:
        """Read the question and write its answer; nothing at all to whoever has no token."""
        try:
            asked = json.loads(_line(self.request, Deadline(_LISTEN_S), _LONGEST_QUESTION))
            token, question = str(asked["token"]), str(asked["ask"])
        except (ValueError, KeyError, TypeError, OSError):
            return
        if secrets.compare_digest(token.encode(), self.server.token.encode()):
            self.request.settimeout(ANSWER_S)
            self.request.sendall(json.dumps(self._answer(question)).encode() + b"\n")

    def _answer(self, question: str) -> dict[str, Any]:
        if question not in self.server.answers:
            return {"error": f"this run doesn't know {question!r}; it can be asked {sorted(self.server.answers)}"}
        try:
            return {"answer": self.server.answers[question]()}
        except Exception as error:  # told to whoever asks; the run itself says elsewhere what ends it
            return {"error": hide(f"{type(error).__name__}: {error}")}


def _line(connection: socket.socket, deadline: Deadline, longest: int) -> bytes:
    """Return what comes up to the end of a line, or of the connection. Raises ``TimeoutError``, ``OSError``."""
    found = bytearray()
    while not found.endswith(b"\n") and len(found) < longest:
        if (left := deadline.left) == 0.0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(1 << 16)
        if not part:
            break
        found += part
    return bytes(found)


def _write(file: Path, address: _Address) -> None:
    """Write the address, whole or not at all, for nobody else to read."""
    beside = file.with_suffix(".new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump(asdict(address), opened)
    os.replace(beside, file)


# --- whoever asks ----------------------------------------------------------------------------------------------------


def ask(folder: Path, question: str, *, seconds: float = ANSWER_S) -> dict[str, Any]:
    """Ask the run in ``folder`` and return its answer.

    Raises ``DataError`` where nobody can be asked, with how the run stands, and ``DeadlineError`` where no answer comes
    in ``seconds``.
    """
    address = _read(folder / CONTROL_FILE)
    if address is None:
        raise DataError(f"{folder}: {_stands(folder)}")
    process = f"process {address.pid} on {address.host}"
    if address.host != socket.gethostname():
        raise DataError(f"{folder}: the run is {process}, and answers there alone: ask on that machine")
    if not process_lives(address.pid):
        raise DataError(f"{folder}: the run has died: {process} is gone and left its control address behind")
    try:
        reply = _exchange(address, question, Deadline(seconds))
    except TimeoutError:
        raise DeadlineError(f"{folder}: waited {seconds:g} s for an answer of {process}, which is there") from None
    except OSError as error:
        raise DataError(f"{folder}: the run has ended or died: {process} isn't it ({error})") from None
    try:
        answered = json.loads(reply)
        if "error" in answered:
            raise DataError(f"{folder}: {process} answers: {answered['error']}")
        answer: dict[str, Any] = answered["answer"]
        return answer
    except (ValueError, KeyError, TypeError):
        reason = "no answer" if not reply else f"{reply[:80]!r}"
        raise DataError(f"{folder}: the run has ended or died: at its port is {reason}") from None


def _exchange(address: _Address, question: str, deadline: Deadline) -> bytes:
    """Send the question and return the answer. Raises ``TimeoutError``, ``OSError``."""
    with socket.create_connection((LOOPBACK, address.port), deadline.left) as connection:
        connection.sendall(json.dumps({"token": address.token, "ask": question}).encode() + b"\n")
        return _line(connection, deadline, _LONGEST_ANSWER)


def _stands(folder: Path) -> str:
    """Return how a run stands that can't be asked."""
    if not folder.is_dir():
        return "there is no such folder. Name the folder of a run"
    state, at_work = state_of(folder, read_about(folder)), owner(folder)
    if at_work is not None:
        return f"the run has no control address: {at_work}, is starting or ending, or could not open one"
    if state.kind == "unknown":
        return f"nothing can be asked here: {state.words}"
    return f"the run is over: {state.kind}, {state.words}"


def _read(file: Path) -> _Address | None:
    """Return the address in ``file``; None where there is none, or none that a run wrote."""
    try:
        found = json.loads(file.read_text())
        return _Address(str(found["host"]), int(found["pid"]), int(found["port"]), str(found["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
