"""Takes the pictures of ``tandem view`` in ``docs/images`` of a real run, light and dark, in the ``chromium`` on PATH.

Run as ``python tools/view_pictures.py RUN_DIR... [--to FOLDER]``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH, HEIGHT = 1100, 760


def take(page: Any, address: str, folder: Path) -> None:
    """Open each of three places of the page in both schemes, and write ``view_PLACE_SCHEME.png``."""
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    for place, key, shown in (
        ("runs", "1", "figure canvas"),
        ("samples", "2", "#samples tbody tr"),
        ("health", "3", "figure canvas"),
    ):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.keyboard.press(key)
            page.wait_for_selector(shown)
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(1000)  # charts are drawn anew for another scheme
            page.screenshot(path=folder / f"view_{place}_{scheme}.png")


def main() -> int:
    """Serve the runs, take the pictures, end the server; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--to", type=Path, default=FOLDER)
    given = parser.parse_args()
    command = [sys.executable, "-m", "tandem", "view", *given.runs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as play:
        try:
            assert server.stdout is not None
            said = (re.search(r"http://127\S+", line) for line in server.stdout)
            address = next(found[0] for found in said if found)
            browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            take(browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}), address, given.to)
            browser.close()
        finally:
            server.terminate()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
