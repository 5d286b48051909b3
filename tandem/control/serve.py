"""``tandem serve`` and ``tandem chat``: a finished model answers at an OpenAI-compatible address, or in a terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from tandem.base.errors import TandemError
from tandem.base.interrupts import INTERRUPTS
from tandem.control.entry import quiet
from tandem.runtime.build.finished import model_at_desk

_PARALLEL, _WAITING = 256, 1024


def run_serve(
    source: str, words: Sequence[str], say: Callable[[str], None], *, host: str, port: int, key: str | None
) -> None:
    """Answer until the process is told to end. Raises ``TandemError``."""
    try:
        from tandem.episodes.address.server import Address, Seat, listening, serve
    except ImportError as error:
        raise TandemError(f"{error.name} is not installed: run `pip install 'tandem-rl[serve]'`") from error

    quiet()

    async def answer() -> None:
        address = Address(served.sampling, served.name)
        with address.seated(Seat(served.desk.ask, parallel=_PARALLEL, waiting=_WAITING), key) as given:
            shown = f"[{host}]" if ":" in host else host
            say(f"export OPENAI_BASE_URL=http://{shown}:{at.getsockname()[1]}/v1 OPENAI_API_KEY={given}")
            say("Ctrl-C ends it")
            server, ended = serve(address, at)
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
            await ended

    with listening(port, host) as at, model_at_desk(source, words) as served, suppress(*INTERRUPTS):
        asyncio.run(answer())


def run_chat(
    source: str,
    words: Sequence[str],
    say: Callable[[str], None],
    *,
    system: str | None = None,
    lines: Iterable[str] | None = None,
) -> None:
    """Answer line by line, until there are no more. Raises ``TandemError``."""
    quiet()
    with model_at_desk(source, words) as served, suppress(*INTERRUPTS):
        begins = [] if system is None else [{"role": "system", "content": system}]
        messages = list(begins)
        for line in _asked() if lines is None else lines:
            if not line.strip():
                messages = list(begins)
                say("(anew)")
                continue
            messages.append({"role": "user", "content": line})
            question = {"op": "chat", "messages": messages, "tools": None}
            if not served.chats:
                question = {"op": "complete", "text": line}
            answer = asyncio.run(served.desk.ask(question))
            messages.append(answer.message)
            say(answer.content + (" …" if answer.finish_reason == "length" else ""))


def _asked() -> Iterator[str]:
    """Yield what is typed, or piped in."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.removesuffix("\n")
