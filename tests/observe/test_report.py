from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import TandemError
from tandem.observe.chart import LEFT, MAX_POINTS, WIDTH, Series, format_number, line_chart, stacked_chart, thin, ticks
from tandem.observe.metrics import METRICS_FILE, MetricLog, RolloutLog, RolloutRecord, read_rows
from tandem.observe.report import headline, read_curves, write_report
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo

VOID = {"meta", "br", "line", "circle", "polyline", "polygon", "rect"}


class WellFormed(HTMLParser):
    """Collects tags and text; fails on a tag that is closed out of order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def log_run(folder: Path, steps: int) -> None:
    metrics, rollouts = MetricLog(folder), RolloutLog(folder)
    for step in range(1, steps + 1):
        row = {"reward/mean": step / steps, "kl/mean": math.nan if step == 2 else 0.1, "lag/max": 0, "updates": step}
        metrics.append(step, {**row, "time/rollout": 2.0, "time/train": 1.0, "time/step": 3.0, "note": "text"})
        rollouts.record(step, [RolloutRecord("1+1=<script>alert(1)</script>", "2", 1.0, "2", step - 1)] * 6)
    if steps:
        metrics.append(steps, {"eval/reward": 0.75})


def page_of(folder: Path, **summary: object) -> WellFormed:
    path = write_report(folder, config={"trainer": {"seed": 1, "note": "正确 {x}"}}, summary=summary)
    assert path == folder / "report.html"
    return WellFormed(path.read_text("utf-8"))


@pytest.mark.parametrize("steps", [0, 1, 2, 45, 1000])
def test_the_page_works_with_any_number_of_steps(tmp_path: Path, steps: int) -> None:
    log_run(tmp_path, steps)
    page = page_of(tmp_path, saved_to="runs/x/final")
    charts = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    if steps == 0:
        assert charts == [] and "No step was logged." in page.text
    else:
        assert charts == ["Reward", "KL to the reference", "Lag", "Time"]
        assert "rollout 67%" in page.text and "train 33%" in page.text
    assert "saved to" in page.text and "runs/x/final" in page.text
    assert "正确 {x}" in page.text


def test_what_goes_on_beside_the_loop_is_no_part_of_its_time(tmp_path: Path) -> None:
    metrics = MetricLog(tmp_path)
    loop, beside = {"wait": 1.0, "train": 3.0, "step": 4.0}, {"rollout": 3.9, "push_transfer": 0.5}
    for step in range(1, 4):
        times = {f"time/{part}": seconds for part, seconds in (loop | beside).items()}
        metrics.append(step, times | {f"cpu/{part}": 0.1 for part in loop})
    text = page_of(tmp_path).text
    assert "wait 25%" in text and "train 75%" in text
    assert dict(headline(read_curves(read_rows(tmp_path / METRICS_FILE))))["time in steps"] == "12s"


def test_the_page_needs_nothing_from_outside_and_runs_nothing(tmp_path: Path) -> None:
    log_run(tmp_path, 3)
    page = page_of(tmp_path)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(name in attributes for _, attributes in page.tags for name in ("src", "href", "onclick"))
    assert "<script>alert(1)</script>" in page.text  # shown as text
    assert not re.search(r"url\(|@import|https?://", (tmp_path / "report.html").read_text("utf-8"))


def test_samples_of_the_first_and_last_step_are_shown(tmp_path: Path) -> None:
    log_run(tmp_path, 20)
    text = page_of(tmp_path).text
    assert text.count("1+1=") == 8


def test_the_head_compares_both_ends_of_the_run(tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": 0.2 if step <= 50 else 0.6} for step in range(1, 101)]
    rows += [{"step": 0, "eval/reward": 0.3}, {"step": 100, "eval/reward": 0.9}]
    tiles = dict(headline(read_curves(rows)))
    assert tiles["reward, first → last 10 steps"] == "0.200 → 0.600"
    assert tiles["evaluation reward"] == "0.300 → 0.900"
    assert tiles["steps"] == "100"


def test_curves_leave_out_what_is_no_number() -> None:
    rows: list[dict[str, object]] = [
        {"step": 2, "a": 1, "b": None},
        {"step": 1, "a": 2.5, "c": "x", "d": True},
        {"step": 2, "a": 3},
        {"a": 9},
    ]
    assert read_curves(rows) == {"a": [(1.0, 2.5), (2.0, 3.0)]}


FINITE = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(ys=st.lists(FINITE, min_size=1, max_size=50))
def test_every_curve_stays_inside_its_frame(ys: list[float]) -> None:
    points = tuple((float(x), y) for x, y in enumerate(ys))
    root = ElementTree.fromstring(line_chart("curve & co", [Series("s", points), Series("none", ())]))
    assert root.attrib["aria-label"] == "curve & co"
    for dot in root.iter("circle"):
        assert LEFT - 0.1 <= float(dot.attrib["cx"]) <= WIDTH
        assert 0 <= float(dot.attrib["cy"]) <= 220
    assert len(list(root.iter("circle"))) == len(ys)


@given(parts=st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=8))
def test_stacked_areas_end_at_their_sum(parts: list[list[float]]) -> None:
    series = [Series(str(i), tuple(enumerate(map(float, part)))) for i, part in enumerate(parts)]
    root = ElementTree.fromstring(stacked_chart("time", series))
    assert len(list(root.iter("polygon"))) == len(parts)


@given(low=FINITE, width=st.floats(1e-6, 1e12))
def test_ticks_are_round_few_and_inside(low: float, width: float) -> None:
    width = max(width, abs(low) * 1e-6)
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-6 * width <= value <= low + width * (1 + 1e-6) for value in found)


def test_long_curves_are_thinned_to_their_means() -> None:
    points = [(float(i), float(i % 2)) for i in range(10 * MAX_POINTS)]
    few = thin(points)
    assert len(few) <= MAX_POINTS
    assert all(y == 0.5 for _, y in few)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1234.5, "1234"), (12345, "12.3k"), (2.5e6, "2.5M"), (-3e9, "-3G")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_run_log_writes_everything_also_when_the_loop_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLog(RunInfo(tmp_path), trace=True) as log:
        with log.timed("rollout"):
            pass
        log.log(1, {"reward/mean": 0.5}, [RolloutRecord("a", "b", None, None, 0)])
        raise ZeroDivisionError("boom")
    assert {p.name for p in tmp_path.iterdir()} == {
        *(".tandem", "about.json", "metrics.jsonl", "rollouts.jsonl", "trace.json", "report.html")
    }
    text = WellFormed((tmp_path / "report.html").read_text("utf-8")).text
    assert "ZeroDivisionError: boom" in text and "rollout 100%" in text


def test_an_output_folder_that_cannot_be_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TandemError, match=r"trainer\.output_dir = '.*file/run' .* choose another folder"):
        RunLog(RunInfo(tmp_path / "file" / "run"))


def test_a_report_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunLog(RunInfo(tmp_path)) as log:
        (tmp_path / "report.html").mkdir()
        log.log(1, {})
    assert "report.html was not written" in caplog.text


def test_an_episode_is_shown_turn_by_turn(tmp_path: Path) -> None:
    call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<b>2</b>"},
        {"role": "assistant", "content": "two"},
    ]
    MetricLog(tmp_path).append(1, {"reward/mean": 1.0, "episode/turns": 2.0})
    record = RolloutRecord("1+1", "raw tokens", 1.0, "2", 0, messages=messages)
    RolloutLog(tmp_path).record(1, [record])
    page = page_of(tmp_path)
    assert 'assistant: add({"x": 1})\ntool: <b>2</b>\nassistant: two' in page.text
    assert "raw tokens" not in page.text and "be brief" not in page.text
    assert "Turns of an episode" in [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
