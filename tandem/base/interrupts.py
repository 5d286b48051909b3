"""SIGINT and SIGTERM: raised where the run may end, kept back where it may not, so that no step is left half done.

The first signal unwinds what is under way, as an exception; inside ``held()``, or from ``hold()`` to ``release()``, it
waits for the end. A second signal ends the process at once. State is of the process, as signals are.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_PATIENCE_S = 2.0
_OF_A_STEP = "the step under way ends first, and is saved"
_OF_ANOTHER_PART = "what is under way ends first"
_AND = "a second signal ends the run at once\n"


class Terminated(BaseException):
    """A supervisor ends the run with SIGTERM: like Ctrl-C it unwinds everything that is under way."""


INTERRUPTS = (KeyboardInterrupt, Terminated)


@dataclass
class _State:
    """``requested``: the signal that came. ``raised``: it has unwound already. ``saved``: the last whole checkpoint."""

    depth: int = 0
    holding: bool = False
    requested: int | None = None
    raised: bool = False
    saved: str = ""
    before: dict[int, Any] = field(default_factory=dict)


_state = _State()


def install() -> None:
    """Handle signals as this module says from here on. Does nothing outside the main thread."""
    global _state
    if threading.current_thread() is not threading.main_thread():
        return
    before = _state.before or {number: signal.getsignal(number) for number in SIGNALS}
    _state = _State(before=before)
    for number in SIGNALS:
        signal.signal(number, _hear)


def installed() -> bool:
    """Return whether signals are handled as this module says."""
    return signal.getsignal(signal.SIGTERM) is _hear


def ignore() -> None:
    """Ignore signals from here on: the process ends, nothing is left to interrupt, and its exit code stays."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def restore() -> None:
    """Give the signals back to who had them before."""
    for number, handler in _state.before.items():
        signal.signal(number, handler)
    _state.before = {}


@contextmanager
def unwinding(message: Callable[[], str]) -> Iterator[None]:
    """Let both signals unwind a loop inside a program of the user's; after it the handlers are as before.

    SIGINT stays the ``KeyboardInterrupt`` that the program may catch; SIGTERM becomes ``SystemExit`` with 143. One line
    says where it ended (``message``); of an interrupt that nobody catches Python prints no traceback after it. A
    program that handles the signals itself, or that runs this in another thread than the main one, keeps what it has.
    """
    usual = [signal.getsignal(number) for number in SIGNALS] == [signal.default_int_handler, signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread() or not usual:
        yield
        return
    install()
    try:
        yield
    except INTERRUPTS as error:
        sys.stderr.write(f"{WORDS[signal.Signals(requested() or signal.SIGINT)]}: {message()}\n")
        if isinstance(error, Terminated):
            raise SystemExit(128 + signal.SIGTERM) from None
        _print_nothing_of(error)
        raise
    finally:
        restore()


def _print_nothing_of(interrupt: BaseException) -> None:
    """Print no traceback of what was told in a line already."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if error is not interrupt:
            usual(kind, error, traceback)

    sys.excepthook = hook


def requested() -> int | None:
    """Return the signal that came, if one did."""
    return _state.requested


def saved() -> str:
    """Return the last whole checkpoint of this process' run, in words; empty before there is one."""
    return _state.saved


def note_saved(what: str) -> None:
    """Note that there is a whole checkpoint, which the message at the end of an interrupted run names."""
    _state.saved = what


@contextmanager
def held() -> Iterator[None]:
    """Let a signal wait for the end of the block. Only the main thread hears signals: in others this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        _raise_pending()


def hold() -> None:
    """Let a signal wait until ``release``; harmless where one waits already."""
    _state.holding = True


def release() -> None:
    """End what ``hold`` began: a signal that came meanwhile takes effect now."""
    _state.holding = False
    _raise_pending()


def _raise_pending() -> None:
    state = _state
    if state.depth == 0 and not state.holding and state.requested is not None and not state.raised:
        _raise(state.requested)


def _raise(number: int) -> None:
    _state.raised = True
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _hear(number: int, frame: FrameType | None) -> None:
    if _state.requested is not None:
        os._exit(128 + number)
    _state.requested = number
    if _state.depth == 0 and not _state.holding:
        _raise(number)
    timer = threading.Timer(_PATIENCE_S, _warn, (_state,))
    timer.daemon = True
    timer.start()


def _warn(state: _State) -> None:
    if not state.raised:
        sys.stderr.write(f"{_OF_A_STEP if state.holding else _OF_ANOTHER_PART}; {_AND}")
