"""The timeline as the page gets it, of files that grow, are cut, or are others now."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tandem.observe.timeline import Trace
from tandem.view.lanes import MOST_SPANS, Lanes

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.sampled_from(["train", "wait", "push 1"])))


def found(lanes: Lanes) -> dict[str, list[tuple[float, float, int, str]]]:
    lanes.look()
    return {lane["name"]: [tuple(span) for span in lane["spans"]] for lane in lanes.describe()}


@given(spans=SPANS)
def test_spans_that_go_on_together_are_drawn_beside_each_other(spans: list[tuple[int, int, str]]) -> None:
    lanes = Lanes(Path("/nowhere"))
    for begin, seconds, name in spans:
        event = f'{{"ph": "X", "name": "{name}", "pid": 1, "tid": 1, "ts": {begin}e6, "dur": {seconds}e6}},'
        lanes._take(event.encode())
    drawn = [span for lane in lanes.describe() for span in lane["spans"]]
    assert len(drawn) == len(spans)
    for i, (begin, seconds, depth, _) in enumerate(drawn):
        for other, others, deep, _ in drawn[i + 1 :]:
            assert depth != deep or other >= begin + seconds - 1e-6 or other + others <= begin + 1e-6
    assert all(0 <= lane["busy"] <= 1 + 1e-9 for lane in lanes.describe())


def test_a_timeline_grows_and_is_read_anew_where_it_is_another(tmp_path: Path) -> None:
    trace, lanes = Trace(tmp_path / "trace.json"), Lanes(tmp_path / "trace.json")
    assert found(lanes) == {}
    trace.add("train", 1_000_000_000, 3_000_000_000, "loop")
    trace.add("step", 0, 4_000_000_000, "loop")
    trace.close()
    (train, step) = sorted(found(lanes)["loop"], key=lambda span: span[3], reverse=True)
    assert [round(value, 3) for value in train[:2]] == [1, 2] and [round(value, 3) for value in step[:2]] == [0, 4]
    assert (train[2], step[2]) == (1, 0)  # it lies inside
    (tmp_path / "trace.json").unlink()
    assert found(lanes) == {}
    again = Trace(tmp_path / "trace.json")
    for second in range(MOST_SPANS + 5):
        again.add("wait", second * 1_000_000_000, (second + 1) * 1_000_000_000, "loop")
    again.close()
    assert len(found(lanes)["loop"]) == MOST_SPANS and lanes.describe()[0]["busy"] == 0


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(
        '[\n{"ph": "X"},\n17,\n{"ph": "X", "name": "a", "pid": 1, "ts": "soon", "dur": 1},\n'
    )
    assert found(Lanes(tmp_path / "trace.json")) == {}
