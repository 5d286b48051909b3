from __future__ import annotations

import io
import sys
import threading
from types import ModuleType

import pytest
from rich.console import Console

from tandem.base.phases import phase
from tandem.observe.progress import ProgressLine, StartLine, format_seconds


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_line(
    total: int | None, clock: Clock, interval: float = 0.0, first: int = 0
) -> tuple[ProgressLine, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=40)
    return ProgressLine(
        total, first_step=first, console=console, plain_interval=interval, beat_s=None, clock=clock
    ), out


def test_a_plain_line_says_all_that_is_known() -> None:
    clock = Clock()
    line, out = plain_line(11, clock)
    clock.now += 6
    line.log(
        1,
        {
            "reward/mean": 0.51234,
            "kl/mean": 0.00123,
            "length/mean": 12.34,
            "throughput/tokens_per_second": 12345.6,
            "other/key": 1,
        },
    )
    assert out.getvalue() == "step 1/11  reward 0.512  kl 0.0012  length 12.3  tokens/s 12,346  left 1m 00s\n"


def test_metrics_that_a_run_lacks_are_left_out() -> None:
    line, out = plain_line(None, Clock())
    line.log(3, {"loss/sft": 2.0})
    line.log(4, {})
    assert out.getvalue() == "step 3  loss 2.0000\nstep 4  loss 2.0000\n"


def test_plain_lines_are_rare_but_the_last_step_is_always_there() -> None:
    clock = Clock()
    line, out = plain_line(100, clock, interval=10.0)
    for step in range(1, 101):
        clock.now += 1
        line.log(step, {})
    line.finish()
    shown = [int(text.split()[1].split("/")[0]) for text in out.getvalue().splitlines()]
    assert shown == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]


def test_time_left_counts_from_the_resumed_step() -> None:
    clock = Clock()
    line, _ = plain_line(60, clock, first=50)
    assert line.seconds_left() is None
    clock.now += 3
    line.log(51, {})
    assert line.seconds_left() == pytest.approx(9 * 3)
    clock.now += 2  # within the next step
    assert line.seconds_left() == pytest.approx(9 * 3 - 2)


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    line = ProgressLine(4, console=console)
    for step in range(1, 5):
        line.log(step, {"reward/mean": step / 4})
    line.finish()
    text = out.getvalue()
    assert "step 4/4  reward 1.000" in text
    assert text.count("\n") == 1  # drawn over itself until the end
    assert "━" * 20 in text


def test_a_narrow_terminal_cuts_the_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=30, color_system=None)
    line = ProgressLine(4, console=console)
    line.log(2, {"reward/mean": 0.5, "kl/mean": 0.1})
    line.finish()
    assert out.getvalue().count("\n") == 1


def drawn(line: ProgressLine) -> str:
    return line._render().plain


METRICS = {"reward/mean": 0.5, "eval/reward": 0.25, "kl/mean": 0.1, "length/mean": 12.0}


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_time_left_is_the_last_thing_to_go_on_a_narrow_terminal(width: int) -> None:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    line = ProgressLine(1000, console=console, clock=clock)
    clock.now += 60
    line.log(1, {**METRICS, "throughput/tokens_per_second": 1234.5})
    with phase("evaluation", 200) as going:
        going.advance(12)
        text = drawn(line)
    line.finish()
    assert len(text) <= width
    assert "step 1/1000" in text and text.endswith("left 16h 39m")
    assert ("evaluation 12/200" in text) == (width >= 60)
    assert ("reward 0.500" in text, "tokens/s" in text, "━" in text) == (width >= 80, width >= 120, width >= 200)


def test_what_goes_on_is_shown_before_the_first_step_is_done() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with StartLine(console=console) as start:
        assert start._render().plain == "starting"
        with phase("loading"), phase("reading the data"):
            assert start._render().plain.startswith("reading the data 0s")
        line = ProgressLine(3, console=console)  # has the terminal from here on
        with phase("evaluation", 4) as going:
            assert "step 0/3  evaluation 0/4 0s" in drawn(line)
            going.advance(2)
            going.began -= 8
            assert "evaluation 2/4 8s 0.25/s" in drawn(line)
        line.finish()


def test_a_log_says_what_goes_on_where_nothing_else_is_printed() -> None:
    said, console = threading.Event(), Console(file=io.StringIO(), force_terminal=False, width=80)
    lines: list[str] = []
    console.print = lambda text, **how: (lines.append(text.plain), said.set())  # type: ignore[method-assign, assignment]
    with phase("evaluation", 7):
        line = ProgressLine(5, console=console, beat_s=0.01)
        assert said.wait(60)
        line.finish()
    assert lines[0].startswith("step 0/5  evaluation 0/7 ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (42.4, "42s"), (59.7, "1m 00s"), (3599, "59m 59s"), (7500, "2h 05m"), (273600, "3d 04h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


class Cell:
    """What IPython's display keeps of one output: its contents, one after the other."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw and display_id
        self.update(bundle, raw=raw)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle["text/plain"])


def test_a_notebook_shows_a_line_and_a_table_of_the_last_steps_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, module = Cell(), ModuleType("IPython.display")
    monkeypatch.setattr(module, "display", cell.display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    console = Console(file=io.StringIO(), force_jupyter=True, width=100)
    line = ProgressLine(12, console=console)
    for step in range(1, 13):
        line.log(step, {"reward/mean": step / 100, "length/mean": 3.0})
    line.finish()
    head, names, *rows = cell.shown[-1].splitlines()
    assert "step 12/12" in head and names.split() == ["step", "reward", "length"]
    assert [row.split() for row in rows] == [[str(n), f"{n / 100:.3f}", "3.0"] for n in range(3, 13)]
    assert "step 0/12" in cell.shown[0] and not any(one.name == "notebook line" for one in threading.enumerate())


def test_what_goes_on_before_a_run_leaves_nothing_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, module = Cell(), ModuleType("IPython.display")
    monkeypatch.setattr(module, "display", cell.display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    with StartLine(console=Console(file=io.StringIO(), force_jupyter=True, width=100)):
        assert cell.shown
    assert cell.shown[-1] == ""
