"""The page as one text: what the server sends in files stands in it."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "page"
STYLES = ("uplot/uPlot.min.css", "style.css")
SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "text.js",
    "source.js",
    "charts.js",
    "runs.js",
    "samples.js",
    "health.js",
    "main.js",
)
PAGES = ("docs/not-learning.md", "docs/rewards.md")
"""Of the documentation, what findings name: they come with the package, so that who installed it can read on."""
FILES = frozenset((*STYLES, *SCRIPTS))

SERVED_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def served() -> str:
    """Return the page that asks a server for everything."""
    styles = "".join(f'<link rel="stylesheet" href="page/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script src="page/{name}" defer></script>\n' for name in SCRIPTS)
    return _shell().replace("<!--head-->", styles + scripts).replace("<!--data-->", "")


def self_contained(data: Any) -> str:
    """Return the page with all that it shows inside: it asks nobody for anything, and its policy forbids it to."""
    styles = "".join(f"<style>{_read(name)}</style>\n" for name in STYLES)
    scripts = [_read(name).replace("</script", "<\\/script") for name in SCRIPTS]
    allowed = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{styles}'
    body = f'<script type="application/json" id="data">{_embedded(data)}</script>\n'
    body += "".join(f"<script>{text}</script>\n" for text in scripts)
    return _shell().replace("<!--head-->", head).replace("<!--data-->", body)


def pages() -> dict[str, str]:
    """Return the pages that findings name: inside an installed package, beside one that is used from its repository."""
    package = Path(__file__).parents[1]
    root = package if (package / "docs").is_dir() else package.parent
    return {name: (root / name).read_text("utf-8") for name in PAGES if (root / name).is_file()}


def _embedded(data: Any) -> str:
    """Return JSON that no parser of HTML takes for markup: texts of a model may hold anything."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _shell() -> str:
    return _read("index.html")


def _read(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")
