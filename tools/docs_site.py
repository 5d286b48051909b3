"""What the documentation site is made of beside ``docs/``: a hook of MkDocs, and a check of what it built.

The README is its first page, each example's README a page, the API reference comes from the docstrings of
the names that ``tandem`` offers. Links to other files of the repository become their text: the site has
no such page.
``python tools/docs_site.py check build/docs`` names each thing that a page would ask of another host.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^```.*?^```[ \t]*$", re.MULTILINE | re.DOTALL)
_INFO = re.compile(r"^```(\w*)[^\n]*$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Fill the empty parts of the navigation: decisions, and examples."""
    decisions = [f"decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    examples = [page for page in page_sources() if page.startswith("examples/")]
    for entry in [entry for part in config.nav if isinstance(part, dict) for entry in (part, *_parts_of(part))]:
        for name, pages in {"Decisions": decisions, "Examples": examples}.items():
            if entry.get(name) == []:
                entry[name] = pages
    return config


def _parts_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entries in part.values() for entry in entries if isinstance(entry, dict)]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of other files of the repository."""
    made = importlib.import_module("mkdocs.structure.files").File.generated  # only the site needs it
    for target, source in page_sources().items():
        content = api_page() if source is None else (ROOT / source).read_text("utf-8")
        files.append(made(config, target, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site, or to nothing; leave out what only tests read of a code block."""
    return for_the_site(markdown, page.file.src_uri)


def page_sources() -> dict[str, Path | None]:
    """Return the pages beside ``docs/``, with the file of which each is made; None: of docstrings."""
    examples = sorted((ROOT / "examples").rglob("README.md"))
    pages: dict[str, Path | None] = {
        "index.md": Path("README.md"),
        "changelog.md": Path("CHANGELOG.md"),
        "api.md": None,
    }
    for readme in examples:
        name = "-".join(readme.parent.relative_to(ROOT / "examples").parts)
        pages[f"examples/{name}.md"] = readme.relative_to(ROOT)
    return pages


def for_the_site(markdown: str, page: str) -> str:
    """Return the text of ``page`` as the site shows it."""
    sources = page_sources()
    source = sources.get(page) or Path("docs") / page
    places = {str(path): target for target, path in sources.items() if path is not None}
    places |= {str(path.parent): target for target, path in sources.items() if path is not None and path.parent.name}

    def moved(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if re.match(r"[a-z]+:|#|mailto", target):
            return link[0]
        path, sharp, anchor = target.partition("#")
        named = os.path.normpath(source.parent / path)
        known = places.get(named) or (named.removeprefix("docs/") if _is_in_docs(named) else None)
        if known is None:  # a file that is nowhere stays a link, so that the build names it
            return text if (ROOT / named).exists() else link[0]
        return f"{mark}[{text}]({os.path.relpath(known, Path(page).parent)}{sharp}{anchor})"

    parts, place = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(moved, markdown[place : fence.start()]), _INFO.sub(r"```\1", fence[0], count=1)]
        place = fence.end()
    return "".join([*parts, _LINK.sub(moved, markdown[place:])])


def _is_in_docs(path: str) -> bool:
    return path.startswith("docs/") and (ROOT / path).is_file()


def api_page() -> str:
    """Return the page of all names that ``tandem`` offers, from their docstrings."""
    names = "\n\n".join(f"::: {home}.{name}" for name, home in offered().items())
    return f"# Python\n\nWhat `import tandem` offers, from its docstrings.\n\n{names}\n"


def offered() -> dict[str, str]:
    """Return the names in ``tandem``, each with its module; nothing is imported."""
    tree = ast.parse((ROOT / "tandem" / "__init__.py").read_text("utf-8"))
    imports = [line for block in tree.body if isinstance(block, ast.If) for line in block.body]
    found = {name.name: str(line.module) for line in imports if isinstance(line, ast.ImportFrom) for name in line.names}
    return dict(sorted(found.items()))


class _Asked(HTMLParser):
    """Collects what a browser would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note addresses of other hosts, but for links that wait for a click."""
        given = dict(attrs)
        loads = tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object", "use")
        loads = loads or (tag == "link" and given.get("rel") != "canonical")
        values = [given.get(name) or "" for name in ("src", "href", "srcset", "data")] if loads else []
        self.found += [value for value in values if re.match(r"(https?:)?//", value)]


def asked_of_others(site: Path) -> Iterator[str]:
    """Yield, for each page and style sheet below ``site``, what it would load from another host."""
    for page in sorted(site.rglob("*.html")):
        parser = _Asked()
        parser.feed(page.read_text("utf-8"))
        yield from (f"{page.relative_to(site)}: {found}" for found in parser.found)
    for sheet in sorted(site.rglob("*.css")):
        for found in re.findall(r"url\(['\"]?((?:https?:)?//[^)'\"]+)", sheet.read_text("utf-8")):
            yield f"{sheet.relative_to(site)}: {found}"


if __name__ == "__main__":
    built = Path(sys.argv[2])
    asked = list(asked_of_others(built))
    pages = sum(1 for _ in built.rglob("*.html"))
    print("\n".join(asked) or f"{pages} pages, which ask nothing of another host")
    sys.exit(1 if asked or not pages else 0)
