"""What a person asks of runs and their samples, and how the page is driven for it, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.base.run_folder import ABOUT_FILE
from tandem.config.trainer import SamplesConfig
from tandem.observe.samples.store import SampleStore
from tandem.view.serve import export
from tests.observe.sample_batches import scored
from tests.view.conftest import opened, serving
from tests.view.runs import HOSTILE, make_run
from tests.view.test_browser import text, until

STEPS, GROUPS, N = 6, 4, 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a judge scored, whose texts are as hostile as can be, and one that was killed."""
    folder = tmp_path_factory.mktemp("runs")
    judged = make_run(folder / "judged", steps=STEPS)
    for part in (judged / "samples").iterdir():
        part.unlink()
    store, count = SampleStore(judged, SamplesConfig(tokens=True)), GROUPS * N
    for step in range(1, STEPS + 1):
        rewards = [round((step * 5 + place) % count / count, 3) for place in range(count)]
        batch = scored(
            [f"answer {step}.{place}" for place in range(count)],
            [*rewards[:-1], float("nan")],
            prompts=[[f"question {place // N} ", f"{HOSTILE[place // N]} "][place < N] for place in range(count)],
            failures=[*[""] * (count - 1), HOSTILE[0]],
            notes=[{"reply": f"Grade {place}. {HOSTILE[place % 4]}"} for place in range(count)],
            version=step - 1,
            advantages=[reward - 0.5 for reward in rewards],
            group=N,
        )
        batch.batch["truncated"] = torch.tensor([place % 4 == 1 for place in range(count)])
        store.keep("train", step, batch)
        store.keep("eval", step, batch[: 2 * N])
    store.settle()
    about = json.loads((make_run(folder / "killed", steps=2, ended=False) / ABOUT_FILE).read_text())
    about["starts"][-1]["pid"] = (1 << 22) + 1  # more than Linux gives to any process
    (folder / "killed" / ABOUT_FILE).write_text(json.dumps(about))
    return folder


@pytest.fixture(params=["served", "file"])
def shown(request: pytest.FixtureRequest, page: Any, runs: Path, tmp_path: Path) -> Any:
    """The page over the runs, from a server and as a file without one."""
    if request.param == "served":
        with serving(runs) as address:
            opened(page, address)
            yield page
    else:
        export([runs], tmp_path / "view.html", lambda words: None)
        page.goto((tmp_path / "view.html").as_uri())
        page.wait_for_selector("body[data-ready]")
        yield page


def column(page: Any, place: int) -> list[str]:
    return [found.strip() for found in page.locator(f"#samples tbody td:nth-child({place})").all_inner_texts()]


def counted(page: Any, count: int, first: int = 1) -> None:
    page.locator("#count", has_text=f"{first} to {min(count, first + 49)} of {count} (").wait_for()


def test_a_run_that_was_killed_is_listed_with_its_end(shown: Any) -> None:
    row = text(shown, "tr[data-run=killed]")
    assert "died" in row and "is gone and left no word: killed, or out of memory" in row
    assert "finished" in text(shown, "tr[data-run=judged]")


def test_axes_crosshair_and_smoothing_are_those_of_all_charts(shown: Any) -> None:
    shown.wait_for_selector("figure[data-title='Held-out reward'] canvas")
    of = "document.querySelector(`figure[data-title='%s']`).chart.drawn"
    box = shown.locator("figure[data-title=Reward] .u-over").bounding_box()
    shown.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60)
    until(shown, f"{of % 'Reward'}.cursor.idx === 3 && {of % 'Held-out reward'}.cursor.idx === 3", True)
    shown.check("input[aria-label=logarithmic]")
    until(shown, f"{of % 'Entropy'} && {of % 'Entropy'}.scales.y.distr", 3)
    for along, last in (("hours", 12 / 3600), ("tokens", 1200), ("step", 6)):  # 2 s and 200 tokens a step
        shown.select_option("select[aria-label=along]", along)
        shown.wait_for_selector("figure[data-title=Reward] canvas")
        assert shown.evaluate(f"{of % 'Reward'}.data[0].at(-1)") == pytest.approx(last)
    shown.locator("input[aria-label=smoothing]").evaluate(
        "range => { range.value = 0.9; range.dispatchEvent(new Event('input')); }"
    )
    shown.wait_for_selector("figure[data-title=Entropy] canvas")
    lines = shown.evaluate(f"{of % 'Entropy'}.data.slice(1).map((line) => [...line].filter((value) => value !== null))")
    raw, smooth = lines[0], lines[1]
    assert smooth[0] == raw[0] and smooth[-1] > raw[-1]  # it follows slowly what falls


def test_samples_are_searched_filtered_and_sorted_by_all_that_is_known_of_them(shown: Any) -> None:
    shown.keyboard.press("2")
    shown.wait_for_selector("#samples")
    whole = STEPS * GROUPS * N
    shown.select_option("select[aria-label=finish]", "length")
    counted(shown, whole // 4)
    assert set(column(shown, 6)) == {"length"}
    shown.select_option("select[aria-label=finish]", "")
    counted(shown, whole)
    shown.select_option("select[aria-label=failure]", HOSTILE[0])
    counted(shown, STEPS)
    shown.select_option("select[aria-label=failure]", "")
    for name, place in (("reward", 2), ("advantage", 3), ("length", 4), ("part: strict", 2)):
        ends = set()
        for sort in (name, f"-{name}"):
            shown.select_option("select[aria-label=sort]", sort)
            until(shown, "document.querySelector('select[aria-label=sort]').value", sort)
            counted(shown, whole)
            shown.wait_for_timeout(100)
            found = [float(value) for value in column(shown, place) if value != "–"]
            assert found == sorted(found, reverse=sort.startswith("-")), sort
            ends.add(found[0])
        assert len(ends) == 2, name
    shown.select_option("select[aria-label=number]", "part: strict")
    shown.fill("input[aria-label=bound]", "0.75")
    shown.keyboard.press("Enter")
    shown.locator(".chip", has_text="part: strict >= 0.75").wait_for()
    until(shown, f"document.querySelector('#count').textContent.includes('of {whole} (')", False)
    assert min(float(value) for value in column(shown, 2)) >= 0.75
    shown.click(".chip")
    counted(shown, whole)
    shown.fill("#search", "grade 7.")  # which only the judge said
    shown.keyboard.press("Enter")
    counted(shown, STEPS)


def test_a_group_shows_what_the_judge_said_and_the_prompt_over_time(shown: Any) -> None:
    shown.keyboard.press("2")
    shown.select_option("select[aria-label=sort]", "step")
    shown.locator("#samples tbody tr:first-child td:first-child", has_text="1").wait_for()
    shown.locator("#samples tbody tr").nth(N).click()  # the second group's first answer
    shown.wait_for_selector("dialog[open] article")
    assert shown.locator("dialog article").count() == N
    shown.locator("dialog article details summary").first.click()
    reply = shown.locator("dialog article details").first.text_content()
    assert "Grade 4. " in reply and HOSTILE[0] in reply and shown.locator("dialog img, dialog script").count() == 0
    shown.wait_for_selector("dialog canvas")
    over = shown.evaluate(
        "[...document.querySelectorAll('dialog figure')].map((figure) => [...figure.chart.drawn.data[1]])"
    )
    expected = [sum(round((step * 5 + place) % 16 / 16, 3) for place in range(N, 2 * N)) / N for step in range(1, 7)]
    assert over[0] == pytest.approx(expected, abs=1e-4)
    shown.locator("dialog button", has_text="all answers to this prompt").click()
    counted(shown, STEPS * N)
    assert sorted(set(column(shown, 1))) == [str(step) for step in range(1, STEPS + 1)]


def test_evaluation_answers_are_seen_step_by_step(shown: Any) -> None:
    shown.keyboard.press("2")
    shown.select_option("select[aria-label=of]", "eval")
    counted(shown, STEPS * 2 * N)
    shown.select_option("select[aria-label=number]", "step")
    for sign in (">=", "<="):
        shown.select_option("select[aria-label=sign]", sign)
        shown.fill("input[aria-label=bound]", "3")
        shown.keyboard.press("Enter")
        shown.locator(".chip", has_text=f"step {sign} 3").wait_for()
    counted(shown, 2 * N)
    assert set(column(shown, 1)) == {"3"} and "answer 3.7" in text(shown, "#samples")


def test_everything_is_reached_by_the_keyboard(shown: Any) -> None:
    for key, tab in (("2", "samples"), ("3", "health"), ("1", "runs")):
        shown.keyboard.press(key)
        shown.wait_for_selector(f"#tab-{tab}[aria-selected=true]")
    shown.keyboard.press("?")
    assert "next and previous page" in text(shown, "dialog[open]")
    shown.keyboard.press("Escape")
    shown.keyboard.press("/")
    until(shown, "document.activeElement.id", "filter")
    shown.keyboard.type("entropy")
    shown.wait_for_selector("figure[data-title='entropy/mean']")
    shown.keyboard.press("Escape")
    shown.keyboard.press("2")
    shown.wait_for_selector("#samples")
    shown.keyboard.press("n")
    counted(shown, STEPS * GROUPS * N, 51)
    shown.keyboard.press("p")
    counted(shown, STEPS * GROUPS * N)
    shown.wait_for_selector("#samples tbody tr:nth-child(50)")
    for key in "jjk":
        shown.keyboard.press(key)
    assert shown.evaluate("document.activeElement.rowIndex") == 2
    shown.keyboard.press("Enter")
    shown.wait_for_selector("dialog[open] article.chosen")
    shown.keyboard.press("Escape")
    shown.keyboard.press("Tab")  # controls have a visible place
    assert shown.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_a_phone_shows_every_view_and_a_group_without_sideways_scrolling(shown: Any) -> None:
    shown.set_viewport_size({"width": 360, "height": 780})
    width = "Math.max(...[...document.querySelectorAll('html, dialog[open]')].map((part) => part.scrollWidth))"
    for key in "123":
        shown.keyboard.press(key)
        shown.wait_for_selector("#view .card")
        assert shown.evaluate(width) <= 360
    shown.keyboard.press("2")
    shown.wait_for_selector("#samples")
    shown.select_option("select[aria-label=sort]", "step")
    shown.locator("#samples tbody tr").first.click()
    shown.wait_for_selector("dialog[open] article")
    assert shown.evaluate(width) <= 360
    assert shown.title() == "Tandem runs"
