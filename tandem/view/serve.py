"""``tandem view``: the server around the page, until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.base.errors import TandemError
from tandem.base.interrupts import INTERRUPTS
from tandem.view.export import write_export
from tandem.view.runs import find_runs

LOOPBACK = "127.0.0.1"


def view(paths: Sequence[Path], say: Callable[[str], None], *, port: int = 0, browse: bool = False) -> None:
    """Serve the page over the runs in ``paths`` until the process is told to end. Raises ``TandemError``."""
    runs = find_runs(paths)
    try:
        import uvicorn

        from tandem.view.server import build_app
    except ImportError as error:
        raise TandemError(f"{error.name} is not installed: run `pip install 'tandem-rl[view]'`") from error
    token = secrets.token_urlsafe(16)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK, port))
        except OSError as error:
            raise TandemError(f"port {port} can't be had ({error.strerror}): choose another with --port") from error
        address = f"http://{LOOPBACK}:{listening.getsockname()[1]}/?token={token}"
        say(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}: {', '.join(runs)}")
        say(f"open {address}\nCtrl-C ends it. From another machine: ssh -L PORT:{LOOPBACK}:PORT, and the same address")
        if browse:
            webbrowser.open(address)
        app = build_app(runs, token, lambda: server.should_exit)
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        with suppress(*INTERRUPTS):  # the way in which it ends
            server.run([listening])


def export(paths: Sequence[Path], out: Path, say: Callable[[str], None]) -> None:
    """Write the page over the runs in ``paths`` as one file. Raises ``TandemError`` where ``out`` is there already."""
    runs = find_runs(paths)
    if out.exists():
        raise TandemError(f"{out} exists: choose another name, or remove it")
    size = write_export(runs, out)
    for name, run in runs.items():
        for what in run.left_out():
            say(f"{name}: left out, since it can't be read: {what}")
    say(f"wrote {out} ({size / 1e6:.1f} MB): {', '.join(runs)}")
