"""Signals between a command's last line and the end of its process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import tandem.cli.app
from tandem import cli
from tandem.base import interrupts
from tandem.cli.reporting import reported


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    interrupts._state.before = {}


def test_a_signal_changes_nothing_once_the_command_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    during = []

    def command() -> None:
        with reported():
            pass
        during.append(interrupts.installed())  # nor is the time between the two left to Python's own handlers

    monkeypatch.setattr(tandem.cli.app, "main", command)
    cli.main()
    assert during == [True]
    for number in interrupts.SIGNALS:
        signal.raise_signal(number)  # would raise, or end this process


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_one_before_is_a_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    monkeypatch.setattr(tandem.cli.app, "main", lambda: signal.raise_signal(number))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 128 + number
    assert capsys.readouterr().err == f"{interrupts.WORDS[number]}\n"


@pytest.mark.parametrize("of_a_step", [False, True])
def test_one_that_waits_says_for_what(of_a_step: bool, capsys: pytest.CaptureFixture[str]) -> None:
    interrupts.install()
    with pytest.raises(KeyboardInterrupt), interrupts.held():  # as libraries are loaded, or a checkpoint is written
        if of_a_step:
            interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        interrupts._warn(interrupts._state)
        interrupts.release()
    told = capsys.readouterr().err
    assert ("the step under way ends first, and is saved" in told) is of_a_step
    assert ("what is under way ends first" in told) is not of_a_step
