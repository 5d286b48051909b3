"""What the documentation site is made of; `make docs-check` builds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import tandem
from tools.docs_site import ROOT, api_page, asked_of_others, for_the_site, offered, page_sources


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("index.md", "[a](docs/data.md#rows)", "[a](data.md#rows)"),
        ("index.md", "[a](examples/ppo)", "[a](examples/ppo.md)"),
        ("index.md", "[a](LICENSE)", "a"),
        ("where.md", "[a](../README.md#x)", "[a](index.md#x)"),
        ("where.md", "[a](../tandem/session/run.py)", "a"),
        ("where.md", "[a](nowhere.md)", "[a](nowhere.md)"),
        ("where.md", "[a](https://example.com) [b](#here)", "[a](https://example.com) [b](#here)"),
        ("where.md", "```yaml part run\nx: '[a](../README.md)'\n```", "```yaml\nx: '[a](../README.md)'\n```"),
        ("one-step.md", "![a](images/step_hybrid.svg)", "![a](images/step_hybrid.svg)"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_nowhere(page: str, link: str, shown: str) -> None:
    assert for_the_site(link, page) == shown


def test_every_page_is_in_the_navigation_and_every_name_in_the_reference() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in [*(path.name for path in (ROOT / "docs").glob("*.md")), *page_sources()]:
        assert f"- {page}\n" in text or page.startswith("examples/"), page
    assert set(offered()) == set(tandem.__all__) - {"__version__"}
    assert all(f"::: {home}.{name}\n" in api_page() for name, home in offered().items())
    assert yaml.safe_load(text)["strict"] is True


def test_what_a_page_loads_from_another_host_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        "<a href='https://x.org'>x</a><script src='a.js'></script><link rel=canonical href='https://y.org/'>"
        "<script src='//cdn.org/a.js'></script><link rel=stylesheet href='https://fonts.org/b'>"
    )
    (tmp_path / "a.css").write_text("a{background:url(b.png)} @import url('https://fonts.org/c');")
    assert [line.partition(": ")[2] for line in asked_of_others(tmp_path)] == [
        "//cdn.org/a.js",
        "https://fonts.org/b",
        "https://fonts.org/c",
    ]
