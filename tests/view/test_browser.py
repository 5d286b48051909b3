"""The page as a person uses it, in a real browser."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tandem.config.trainer import SamplesConfig
from tandem.observe.about import note_end
from tandem.observe.metrics import MetricLog
from tandem.observe.samples.parts import parts_in, write_part
from tandem.observe.samples.store import SampleStore
from tandem.observe.samples.table import sample_table
from tandem.view.serve import export
from tests.observe.sample_batches import scored
from tests.view.conftest import opened, serving
from tests.view.runs import HOSTILE, add_step, make_run

STEPS, PER_STEP = 2000, 512


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", texts=HOSTILE, tokens=True)
    make_run(folder / "two", steps=4, lr=1e-4)
    return folder


def until(page: Any, expression: str, value: object) -> None:
    """Wait until an expression has this value; the page's policy forbids to wait inside it."""
    deadline = time.monotonic() + 20
    while (found := page.evaluate(expression)) != value:
        assert time.monotonic() < deadline, f"{expression} is {found}"
        page.wait_for_timeout(50)


def text(page: Any, selector: str) -> str:
    found: str = page.inner_text(selector)
    return found


def test_two_runs_are_compared(page: Any, runs: Path) -> None:
    with serving(runs) as address:
        opened(page, address)
        assert "token" not in page.url
        assert "optim.lr" in text(page, "#differences") and "trainer.seed" not in text(page, "#differences")
        assert "of 92 % scored" in text(page, "tr[data-run=one]") and "finished" in text(page, "tr[data-run=one]")
        page.wait_for_selector("figure[data-title=Reward] canvas")
        lines = "figure[data-title=Reward] .u-legend .u-series"
        assert page.locator(lines).count() == 3  # steps, and a line for each
        page.uncheck("tr[data-run=two] input")
        until(page, f"document.querySelectorAll('{lines}').length", 2)
        page.fill("#filter", "time/tr")
        page.wait_for_selector("figure[data-title='time/train']")
        assert page.locator("figure").count() == 1


def test_zoom_and_smoothing_are_those_of_all_charts(page: Any, runs: Path) -> None:
    with serving(runs) as address:
        opened(page, address)
        page.wait_for_selector("figure[data-title='Held-out reward'] canvas")
        ends = """title => {
            const scale = document.querySelector(`figure[data-title='${title}']`).chart.drawn.scales.x;
            return [scale.min, scale.max];
        }"""
        box = page.locator("figure[data-title=Reward] .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 50)
        page.mouse.up()
        low, high = page.evaluate(ends, "Reward")
        assert 1 < low < high < 6 and page.evaluate(ends, "Held-out reward") == [low, high]
        page.locator("input[aria-label=smoothing]").evaluate(
            "range => { range.value = 0.9; range.dispatchEvent(new Event('input')); }"
        )
        page.wait_for_selector("figure[data-title=Reward] canvas")
        assert "smoothed" in text(page, "figure[data-title=Reward] .u-legend")
        page.select_option("select[aria-label=along]", "tokens")
        page.wait_for_selector("figure[data-title=Reward] canvas")
        assert page.evaluate(ends, "Reward")[1] == 1200  # 6 steps of 2 s at 100 tokens a second


def test_an_evaluation_before_the_first_step_is_seen_beside_curves_that_begin_later(page: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    metrics = tmp_path / "one" / "metrics.jsonl"
    metrics.write_text(f'{{"step": 0, "eval/reward": 0.1}}\n{metrics.read_text()}')
    with serving(tmp_path) as address:
        opened(page, address)
        page.wait_for_selector("figure[data-title='Held-out reward'] canvas")
        begins = "title => document.querySelector(`figure[data-title='${title}']`).chart.drawn.scales.x.min"
        assert [page.evaluate(begins, title) for title in ("Reward", "Held-out reward")] == [1, 0]


def test_prompts_that_fell_lead_to_their_answers(page: Any, runs: Path) -> None:
    with serving(runs) as address:
        opened(page, address)
        page.keyboard.press("2")
        page.wait_for_selector("#samples")
        page.click("#fell")
        page.wait_for_selector("#prompts")
        assert text(page, "#prompts tbody tr:first-child td") == "row0"
        page.click("#prompts tbody tr:first-child")
        page.wait_for_selector("#samples")
        assert "of 24" in text(page, "#count")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open] article")
        assert page.locator("dialog article").count() == 4 and page.locator("dialog canvas").count() == 2
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        page.go_back()
        assert "#runs" in page.url or "#" not in page.url


@pytest.mark.parametrize("tokens", [False, True])
def test_what_an_episode_was_told_is_marked(page: Any, tmp_path: Path, tokens: bool) -> None:
    folder = make_run(tmp_path / "played", steps=1)
    batch = scored(["ab(3)c"] * 2, [1.0, 0.0])
    sampled = torch.tensor([letter not in "(3)" for letter in "ab(3)c" * 2])
    batch.batch["response_mask"] = batch.ragged("response_mask").like(sampled)
    write_part(folder, "train", 1, sample_table(batch, 1, "train", tokens=tokens))
    with serving(tmp_path) as address:
        opened(page, address)
        page.keyboard.press("2")
        page.wait_for_selector("#samples")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open] article .inserted")
        assert "".join(page.locator("dialog article").first.locator(".inserted").all_inner_texts()) == "(3)"


def test_failures_are_filtered_and_texts_searched(page: Any, runs: Path) -> None:
    with serving(runs) as address:
        opened(page, address)
        page.keyboard.press("2")
        page.select_option("select[aria-label=failure]", "ValueError: no number in it")
        page.locator("#count", has_text="of 6 ").wait_for()
        until(page, "document.querySelectorAll('#samples tbody tr').length", 6)
        page.keyboard.press("/")
        page.keyboard.type("answer 4.2")
        page.keyboard.press("Enter")
        page.locator("#count", has_text="of 1 ").wait_for()
        assert "answer 4.2.3" in text(page, "#samples")
        page.reload()  # the address says what is shown
        page.locator("#count", has_text="of 1 ").wait_for()


def test_what_a_model_wrote_is_text_and_nothing_else(page: Any, runs: Path) -> None:
    with serving(runs) as address:
        opened(page, address)
        page.goto(f"{address}#samples?run=one&sort=step")
        page.wait_for_selector("#samples")
        listed = page.evaluate("document.querySelector('#samples').textContent")
        assert HOSTILE[0] in listed and HOSTILE[1] in listed and "\\x1B[31mred" in listed and "U+202Egnp.exe" in listed
        page.click("#samples tbody tr:first-child")
        page.wait_for_selector("dialog[open] article")
        shown = page.evaluate("document.querySelector('dialog').textContent")
        assert HOSTILE[0] in shown and "\x1b" not in shown and "\u202e" not in shown
        page.keyboard.press("Escape")
        page.click("#samples tbody tr:nth-child(5)")  # 100 kB without a space
        page.wait_for_selector("dialog[open] article")
        assert page.title() == "Tandem runs" and page.locator("#view img, dialog img, dialog script").count() == 0
        assert page.evaluate(
            "document.querySelector('dialog').scrollWidth <= document.querySelector('dialog').clientWidth"
        )
        assert page.evaluate("document.querySelectorAll('dialog span').length") < 10_000


def test_a_run_that_goes_on_grows_on_the_page(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3, ended=False)
    with serving(run) as address:
        opened(page, address)
        assert "running" in text(page, "tr[data-run=run]")
        log = MetricLog(run, resumed_step=3)
        add_step(log, SampleStore(run, SamplesConfig(), resumed_step=3), 4, 4, (3, 4))
        log.close()
        page.locator("tr[data-run=run] td.n", has_text="4").first.wait_for()
        steps = "document.querySelector('figure[data-title=Reward]').chart.drawn.data[0].join()"
        until(page, steps, "1,2,3,4")
        page.keyboard.press("2")
        page.wait_for_selector("#samples")
        assert "of 48" in text(page, "#count")
        note_end(run, ValueError("it broke"))
        page.keyboard.press("3")
        page.locator("#view", has_text="it broke").wait_for()


def test_the_exported_file_is_the_page_without_a_server(page: Any, runs: Path, tmp_path: Path) -> None:
    export([runs], tmp_path / "view.html", lambda words: None)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "view.html").as_uri())
    page.wait_for_selector("figure[data-title=Reward] canvas")
    assert "optim.lr" in text(page, "#differences")
    page.keyboard.press("2")
    page.wait_for_selector("#samples")
    assert "72 in this file" in text(page, "#count")
    page.select_option("select[aria-label=failure]", "*")
    page.locator("#count", has_text="of 6 ").wait_for()
    page.click("#fell")
    page.click("#prompts tbody tr:first-child")
    page.wait_for_selector("#samples")
    page.click("#samples tbody tr:first-child")
    page.wait_for_selector("dialog[open] article")
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    page.wait_for_selector("#findings li")
    assert page.title() == "Tandem runs" and [url for url in asked if not url.startswith("file://")] == []


def test_a_phone_in_the_dark_needs_no_sideways_scrolling(page: Any, runs: Path) -> None:
    page.set_viewport_size({"width": 360, "height": 780})
    page.emulate_media(color_scheme="dark")
    with serving(runs) as address:
        opened(page, address)
        for tab in ("runs", "samples", "health"):
            page.click(f"#tab-{tab}")
            page.wait_for_selector(f"#tab-{tab}[aria-selected=true]")
            page.wait_for_selector("#view .card")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, tab
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme="light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


# --- a large run -----------------------------------------------------------------------------------------------------


def make_large(folder: Path) -> Path:
    """2,000 steps of 512 samples, whose rewards rise and whose texts are those of one step."""
    make_run(folder, steps=1)
    batch = scored(
        ["word " * 40 + str(i) for i in range(PER_STEP)], [0.0] * PER_STEP, group=8, advantages=[0.1] * PER_STEP
    )
    table = sample_table(batch, 1, "train")
    log = MetricLog(folder, resumed_step=0)
    for step in range(1, STEPS + 1):
        changed = table.set_column(0, table.schema.field(0), pa.array([step] * PER_STEP, pa.int32()))
        place = table.schema.get_field_index("reward")
        rewards = pa.array([(step + i) % 1000 / 1000 for i in range(PER_STEP)], pa.float32())
        write_part(folder, "train", step, changed.set_column(place, table.schema.field(place), rewards))
        log.append(
            step, {f"metric/{i}": step / (i + 1) for i in range(60)} | {"reward/mean": step / STEPS, "time/step": 1.0}
        )
    log.close()
    return folder


def test_a_million_samples_are_paged_by_the_server(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.observe.samples.parts.flush", lambda path: None)  # 2,000 waits for a disk
    run = make_large(tmp_path / "run")
    assert len(parts_in(run)) == STEPS + 1 and pq.ParquetFile(parts_in(run)[-1].path).metadata.num_rows == PER_STEP
    with serving(run) as address:
        opened(page, address)
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        page.keyboard.press("2")
        page.locator("#count", has_text="1,024,000").wait_for(timeout=120_000)
        page.select_option("select[aria-label=sort]", "-reward")
        page.locator("#samples tbody tr:first-child td:nth-child(2)", has_text="0.999").wait_for(timeout=60_000)
        heap = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
        print(f"first paint {paint:.0f} ms, {heap:.0f} MB of the page's heap")
        assert page.locator("#samples tbody tr").count() == 50
        assert heap < 100
