"""How a command ends: errors raised on purpose as a message and an exit code, interrupts with what goes on."""

from __future__ import annotations

import errno
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from tandem.base import interrupts
from tandem.base.errors import TandemError
from tandem.base.folders import means_no_room
from tandem.base.hidden import hide_words
from tandem.config.arguments import without_resume

_OF_THE_DISK = (errno.EACCES, errno.EPERM, errno.EIO, errno.EROFS)


@contextmanager
def reported(command: str = "", words: Sequence[str] = ()) -> Iterator[None]:
    """Turn errors raised on purpose into a message and their exit code; others keep their traceback.

    Ctrl-C and SIGTERM end what was started and write what is written at the end of a run; the message names what goes
    on with ``command`` and its ``words``.
    """
    outer = interrupts.installed()  # by a process that ends with this command
    interrupts.install()
    try:
        with _errors_in_words():
            yield
    except BaseException as error:
        number = interrupts.requested()
        if number is None and not isinstance(error, KeyboardInterrupt):
            raise
        number = signal.SIGINT if number is None else number  # whatever it became on its way through libraries
        typer.echo(_interrupted(number, command, words), err=True)
        raise typer.Exit(128 + number) from None
    finally:
        if not outer:
            interrupts.restore()


def _interrupted(number: int, command: str, words: Sequence[str]) -> str:
    """Return one line: what came, what is saved, and the command that goes on."""
    text, saved = interrupts.WORDS[signal.Signals(number)], interrupts.saved()
    if not command:
        return text
    shown = hide_words(words)
    if not saved:
        return f"{text} before a step was saved; begin again with: {shlex.join(['tandem', command, *shown])}"
    again = shlex.join(["tandem", command, *without_resume(shown), "--resume"])
    return f"{text}; {saved}; go on with: {again}"


@contextmanager
def _errors_in_words() -> Iterator[None]:
    """Put the message and the exit code of an error."""
    try:
        yield
    except interrupts.INTERRUPTS:
        raise
    except TandemError as error:
        if interrupts.requested() is not None:
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except BaseException as error:  # what libraries raise of a disk that is full need not be an OSError
        file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        if means_no_room(error):
            text = "no room is left to write to (a full disk, a quota, or a limit of file sizes). Free some, or choose "
            text += "another trainer.output_dir"
        elif file and isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            text = f"{error.strerror}. Mend that"
        else:
            raise
        saved = interrupts.saved()
        again = f"; {saved}, so the run goes on with --resume" if saved else ""
        typer.echo(f"error: {file}{text}{again}", err=True)
        raise typer.Exit(1) from None
