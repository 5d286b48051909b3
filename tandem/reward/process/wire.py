"""Messages between the pool and its processes, over a stream socket: a length, then that many bytes.

The pool sends pickles of its own making. A process answers in JSON, so nothing that a scorer returns is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

from tandem.reward.outcome import Outcome, Verdict
from tandem.reward.scoring import ScorerSpec

_LENGTH = struct.Struct("!I")
_READ = 1 << 16


@dataclass(frozen=True)
class Setup:
    """The first message to a process."""

    spec: ScorerSpec
    path: list[str]  # sys.path of the pool's process
    deadline_s: float
    tokenizer: bytes | None  # pickled


def send(channel: socket.socket, message: bytes) -> None:
    """Send one message; blocks while the receiver's buffer is full, up to the socket's timeout."""
    channel.sendall(_LENGTH.pack(len(message)) + message)


def receive(channel: socket.socket) -> bytes | None:
    """Return the next message, or None if the sender is gone. Blocks."""
    head = _exactly(channel, _LENGTH.size)
    return None if head is None else _exactly(channel, _LENGTH.unpack(head)[0])


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    pieces = bytearray()
    while len(pieces) < count:
        piece = channel.recv(count - len(pieces))
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)


class Inbox:
    """Messages that have arrived, taken out of the socket without waiting."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = bytearray()
        self.closed = False

    def messages(self) -> list[bytes]:
        """Return all messages that are here; sets ``closed`` once the sender is gone."""
        while not self.closed:
            try:
                piece = self._channel.recv(_READ, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self.closed = not piece
            self._buffer += piece
            if len(piece) < _READ:
                break
        found: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._buffer, start)[0]
            if end > len(self._buffer):
                break
            found.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return found


def pack_verdicts(job: int, verdicts: list[Verdict], seconds: float) -> bytes:
    """Return the answer to job number ``job`` of the current message, and how long it took."""
    rows = [[v.reward, v.outcome, v.reason, v.metrics, v.components, v.notes] for v in verdicts]
    return json.dumps({"job": job, "verdicts": rows, "seconds": seconds}).encode()


def unpack_verdicts(answer: Any) -> tuple[int, list[Verdict], float]:
    """Return what ``pack_verdicts`` packed, already read from JSON."""
    rows = [
        Verdict(reward, Outcome(outcome), reason, metrics, tuple(components), notes)
        for reward, outcome, reason, metrics, components, notes in answer["verdicts"]
    ]
    return answer["job"], rows, answer["seconds"]
