"""How soon the page of ``tandem view`` is seen, and what it holds, of a run of 2,000 steps with 512 samples each.

Opens the page several times in the ``chromium`` on PATH, from one server that has read nothing before the first time.
Prints milliseconds from the navigation to the first paint (the browser's own entry), to the curves being there, and to
a page of samples in the order of the reward; the ratio of the slowest paint to 1,500 ms; and the page's heap.
Run: ``python -m bench.view [--times 5]``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from statistics import median
from unittest.mock import patch

from playwright.sync_api import Browser, sync_playwright

from tests.view.conftest import TOKEN, serving
from tests.view.test_browser import make_large

BOUND_MS = 1500.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as out, sync_playwright() as play:
        with patch("tandem.observe.samples.parts.flush", lambda path: None):  # 2,000 waits for a disk
            run = make_large(Path(out) / "run")
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with serving(run) as address:
            seen = [look(browser, address) for _ in range(times)]
        browser.close()
    paints = [one["paint_ms"] for one in seen]
    found = {name: round(median(one[name] for one in seen)) for name in seen[0]}
    print(json.dumps({"first": seen[0], "median": found, "slowest_paint_over_1500_ms": max(paints) / BOUND_MS}))


def look(browser: Browser, address: str) -> dict[str, float]:
    """Open the page in a window of its own, without a cache, and go through it."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto(f"{address}?token={TOKEN}")
    page.wait_for_selector("figure canvas")
    now, paint = "performance.now()", "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    found = {"paint_ms": page.evaluate(paint), "curves_ms": page.evaluate(now)}
    begun = page.evaluate(now)
    page.evaluate("location.hash = '#samples?sort=-reward'")
    page.locator("#samples tbody tr:first-child td:nth-child(2)", has_text="0.999").wait_for(timeout=120_000)
    found |= {"samples_ms": page.evaluate(now) - begun}
    found |= {"heap_mb": page.evaluate("performance.memory.usedJSHeapSize") / 1e6}
    page.goto("about:blank")
    page.close()
    return {name: round(value) for name, value in found.items()}


if __name__ == "__main__":
    main()
