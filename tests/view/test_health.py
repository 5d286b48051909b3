"""The Health page of a run that was trained, and what it says of curves that are off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.observe.about import note_begin, note_end
from tandem.observe.metrics import MetricLog
from tandem.view.serve import export
from tests.e2e.seven import make_task, train, write_rows
from tests.view.conftest import opened, serving
from tests.view.test_parts_of_it import CASES

STEPS = 6
PANELS = (
    "Reward and its spread",
    "Groups without spread",
    "Scorings",
    "Advantages",
    "Entropy",
    "KL",
    "Clipped tokens",
    "Gradient norm",
    "Length",
    "Truncated",
    "Lag",
    "Engine against trainer",
    "Fraction of the best step",
    "Throughput",
    "Engines at work",
    "Engines on this partition",
    "Processors",
    "Memory",
    "Disk",
    "Updates left out",
    "Where the time of a step goes",
)
"""What this run has; GPU memory is among Memory where there is one."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the whole loop: rollout and training beside each other, KL, evaluation, a timeline, tokens."""
    folder = tmp_path_factory.mktemp("seven")
    held_out = write_rows(folder / "val.jsonl", [{"prompt": f"{d}>", "answer": str(d) * 4} for d in (3, 8)])
    run = train(
        make_task(folder),
        "execution.mode=fully_async",
        "execution.max_staleness=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "algorithm.kl={in: loss, coef: 0.001}",
        f"data.val_files=[{held_out}]",
        "data.drop_val_prompts=false",
        "evaluation.interval=2",
        "trainer.trace=true",
        "trainer.samples.tokens=true",
        f"trainer.total_steps={STEPS}",
    )
    return run.output


def shown(page: Any, title: str) -> tuple[int, int]:
    """How many values a chart draws, and how many of them are numbers; it is drawn once it is seen."""
    page.locator(f"figure[data-title='{title}']").scroll_into_view_if_needed()
    page.wait_for_selector(f"figure[data-title='{title}'] canvas")
    lines = page.evaluate(
        "title => document.querySelector(`figure[data-title='${title}']`).chart.drawn.data.slice(1)", title
    )
    values = [value for line in lines for value in line if value is not None]
    return len(values), sum(isinstance(value, int | float) for value in values)


def test_health_shows_every_curve_of_a_run(page: Any, trained: Path) -> None:
    with serving(trained) as address:
        opened(page, address)
        page.keyboard.press("3")
        page.wait_for_selector("figure[data-title=Length]")
        for title in PANELS:
            drawn, numbers = shown(page, title)
            assert drawn == numbers >= STEPS, title
        assert "length/p90" in page.inner_text("figure[data-title=Length]")
        assert "mismatch/abs_same" in page.inner_text("figure[data-title='Engine against trainer']")


def test_the_timeline_has_all_roles_and_pushes(page: Any, trained: Path, tmp_path: Path) -> None:
    export([trained], tmp_path / "view.html", lambda words: None)
    with serving(trained) as address:
        for place in (None, (tmp_path / "view.html").as_uri()):
            if place is None:
                opened(page, address)
            else:
                page.goto(place)
            page.wait_for_selector("body[data-ready]")
            page.keyboard.press("3")
            page.wait_for_selector(".lane")
            page.select_option("#timeline select", "all")
            named = "[...document.querySelectorAll('.lane')].map((lane) => lane.dataset.lane)"
            lanes = page.evaluate(named)
            assert {"MainThread", "actor_fwd", "advantages", "reference", "weights to rollout-0"} <= set(lanes)
            for lane, span in (("MainThread", "step"), ("actor_fwd", "old"), ("rollout-0, 0", "generate train_0")):
                assert page.locator(f"[data-lane='{lane}'] i[data-name='{span}']").count() >= 1, lane
            assert page.locator("[data-lane='weights to rollout-0'] i.pushes").count() >= STEPS - 1
            assert page.locator("[data-lane=MainThread] i[data-name=step]").count() == STEPS
            page.select_option("#timeline select", "1")
            assert page.locator("[data-lane=MainThread] i[data-name=step]").count() == 1


def test_tokens_are_shaded_by_how_likely_they_were(page: Any, trained: Path) -> None:
    with serving(trained) as address:
        opened(page, address)
        page.keyboard.press("2")
        page.wait_for_selector("#samples")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open] article")
        tokens = page.evaluate(
            "[...document.querySelectorAll('dialog article pre span[title]')]"
            ".map((token) => [token.title, getComputedStyle(token).backgroundColor])"
        )
        assert len(tokens) >= 8
        likely = {float(title.rpartition("p ")[2]): shade for title, shade in tokens}
        shades = [float(shade.rpartition("/")[2].strip(" )")) for _, shade in sorted(likely.items())]
        assert shades == sorted(shades, reverse=True) and shades[0] > shades[-1]


# --- findings --------------------------------------------------------------------------------------------------------


def test_each_finding_is_said_with_the_page_that_says_what_to_do(page: Any, tmp_path: Path) -> None:
    for place, (bad, _) in enumerate(CASES.values()):
        folder = tmp_path / f"run-{place:02}"
        folder.mkdir()
        note_begin(folder, None)
        (folder / "config.yaml").write_text("data: {train_batch_size: 8}")
        log = MetricLog(folder)
        for row in bad:
            log.append(int(str(row["step"])), {key: value for key, value in row.items() if key != "step"})
        log.close()
        note_end(folder, None)
    export([tmp_path], tmp_path / "view.html", lambda words: None)
    with serving(tmp_path) as address:
        opened(page, address)
        page.keyboard.press("3")
        for place, title in enumerate(CASES):
            page.select_option("select[aria-label=run]", f"run-{place:02}")
            finding = page.locator("#findings li", has_text=title)
            finding.wait_for()
            assert any(letter.isdigit() for letter in finding.inner_text())
            finding.locator("button").click()
            page.locator(
                "dialog[open] h3", has_text="does not learn" if title != "Scorings fail" else ""
            ).first.wait_for()
            assert page.locator("dialog .page table tr").count() > 3
            page.keyboard.press("Escape")
    page.goto((tmp_path / "view.html").as_uri())  # what it says to do is in the file too
    page.wait_for_selector("body[data-ready]")
    page.keyboard.press("3")
    page.locator("#findings li button").first.click()
    page.wait_for_selector("dialog[open] .page table")
