"""A page in a real browser: Debian's ``chromium`` or another of that name on PATH."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TOKEN = "token"
_opened: list[Any] = []
"""Windows on a server's page."""


@contextmanager
def serving(*paths: Path) -> Iterator[str]:
    """The address of a server over the runs in ``paths``."""
    import uvicorn

    from tandem.view.runs import find_runs
    from tandem.view.server import build_app

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = build_app(find_runs(paths), TOKEN, lambda: server.should_exit)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            while _opened:
                _opened.pop().goto("about:blank")  # so that nothing is asked of a server that has ended
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("uvicorn", reason="tandem-rl[view] is not installed")
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no chromium is on PATH: apt-get install chromium")
    with api.sync_playwright() as play:
        made = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A window that fails the test where the page raises, or asks another host."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    made, wrong = context.new_page(), list[str]()
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("dialog", lambda dialog: wrong.append(f"a script asked: {dialog.message}"))
    made.on("request", lambda request: wrong.append(request.url) if foreign(request.url) else None)
    yield made
    context.close()
    assert wrong == []


def foreign(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "file://", "data:", "blob:"))


def opened(page: Any, address: str) -> None:
    """Open the page at a server's address, and wait until it shows its runs."""
    _opened.append(page)
    page.goto(f"{address}?token={TOKEN}")
    page.wait_for_selector("body[data-ready]")
