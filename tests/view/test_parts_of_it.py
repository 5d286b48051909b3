"""Tails, names of runs, findings and the file to send on."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError, TandemError
from tandem.observe.metrics import MetricLog
from tandem.observe.samples.parts import parts_in
from tandem.view.document import PAGES, pages, self_contained
from tandem.view.export import exported_samples
from tandem.view.findings import find
from tandem.view.runs import find_runs, spaced
from tandem.view.samples import SampleIndex
from tandem.view.serve import export
from tandem.view.tail import Tail
from tests.view.runs import HOSTILE, append_line, make_run, spoil


def test_a_look_reads_only_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert not tail.look() and tail.rows == []
    append_line(tmp_path, {"step": 1})
    assert tail.look() and [row["step"] for row in tail.rows] == [1]
    path.write_bytes(b" " * len(path.read_bytes()))  # what was read is not looked at again
    with path.open("a") as file:
        file.write('{"step": 2}\n{"step": 3, "rew')
    assert tail.look() and [row["step"] for row in tail.rows] == [1, 2]
    with path.open("a") as file:
        file.write('ard": 1}\nnot json\n[]\n{"no": "step"}\n')
    assert tail.look() and tail.rows[-1] == {"step": 3, "reward": 1} and len(tail.rows) == 3
    assert not tail.look() and tail.generation == 0


def test_a_file_that_a_resume_rewrote_is_read_anew(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        append_line(tmp_path, {"step": step})
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.look()
    log = MetricLog(tmp_path, resumed_step=1)
    log.append(2, {"again": 1})
    log.close()
    assert tail.look() and [row["step"] for row in tail.rows] == [1, 2] and tail.generation == 1


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name in ("a/run", "b/run", "c/other"):
        make_run(tmp_path / name, steps=1, groups=1)
    assert list(find_runs([tmp_path / "a", tmp_path / "b" / "run", tmp_path / "c", tmp_path / "a" / "run"])) == [
        "a/run",
        "b/run",
        "c/other",
    ]
    with pytest.raises(DataError, match="no run is there"):
        find_runs([tmp_path / "nothing"])


def test_a_run_that_ended_before_its_first_step_is_one_and_a_lone_config_is_none(tmp_path: Path) -> None:
    make_run(tmp_path / "trained", steps=1, groups=1)
    (make_run(tmp_path / "failed", steps=1, groups=1) / "metrics.jsonl").unlink()
    (tmp_path / "config.yaml").write_text("trainer: {seed: 0}")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").touch()
    assert list(find_runs([tmp_path])) == ["failed", "trained"]
    with pytest.raises(DataError, match="no run is there"):
        find_runs([tmp_path / "configs"])


@given(count=st.integers(0, 60), most=st.integers(2, 20))
def test_long_curves_keep_both_ends(count: int, most: int) -> None:
    rows: list[dict[str, object]] = [{"step": step} for step in range(count)]
    shown = spaced(rows, most)
    assert len(shown) == min(count, most)
    assert not rows or (shown[0] == rows[0] and shown[-1] == rows[-1])


# --- findings --------------------------------------------------------------------------------------------------------


def rows(count: int = 60, **curves: Any) -> list[dict[str, object]]:
    named = {key.replace("__", "/"): of for key, of in curves.items()}
    return [{"step": i + 1, **{key: of(i / (count - 1)) for key, of in named.items()}} for i in range(count)]


def titles(found: list[dict[str, object]], **config: Any) -> list[str]:
    return [finding.title for finding in find(found, {key.replace("__", "."): value for key, value in config.items()})]


CASES = {
    "Scorings fail": (rows(reward__scored_share=lambda t: 0.9), rows(reward__scored_share=lambda t: 1.0)),
    "Rewards have no spread": (
        rows(reward__groups_without_signal=lambda t: 8 * t), rows(reward__groups_without_signal=lambda t: 4.0)
    ),
    "Nothing is learned yet": (rows(reward__mean=lambda t: 0.2), rows(reward__mean=lambda t: t)),
    "Entropy collapses": (rows(entropy__mean=lambda t: 1 - 0.99 * t), rows(entropy__mean=lambda t: 1 - 0.5 * t)),
    "More and more answers are cut": (rows(length__truncated=lambda t: t), rows(length__truncated=lambda t: 0.1)),
    "Many answers are cut": (rows(length__truncated=lambda t: 0.6), rows(length__truncated=lambda t: 0.1)),
    "Reward follows length": (
        rows(reward__mean=lambda t: t, length__mean=lambda t: 10 + 90 * t),
        rows(reward__mean=lambda t: t, length__mean=lambda t: 10.0)
    ),
    "Held-out prompts don't follow": (
        rows(reward__mean=lambda t: t, eval__reward=lambda t: 0.1),
        rows(reward__mean=lambda t: t, eval__reward=lambda t: t)
    ),
    "Engine and trainer drift apart": (rows(mismatch__abs=lambda t: 0.1 * t), rows(mismatch__abs=lambda t: 0.001)),
    "Updates are skipped": (rows(optim__skipped_steps=lambda t: t * 3), rows(optim__skipped_steps=lambda t: 0.0)),
    "Steps are large": (rows(loss__clipfrac=lambda t: 0.5), rows(loss__clipfrac=lambda t: 0.1)),
}  # fmt: skip


@pytest.mark.parametrize("title", CASES)
def test_what_is_off_is_found_and_what_is_not_is_not(title: str) -> None:
    bad, good = CASES[title]
    assert title in titles(bad, data__train_batch_size=8)
    assert titles(good, data__train_batch_size=8) == []


def test_little_says_nothing_of_a_trend() -> None:
    assert titles(rows(6, reward__mean=lambda t: 0.2, entropy__mean=lambda t: 1 - t)) == [] == titles([])


def test_the_pages_that_findings_name_are_there() -> None:
    for bad, _ in CASES.values():
        for finding in find(bad, {"data.train_batch_size": 8}):
            assert (Path(__file__).parents[2] / finding.page).read_text("utf-8") == pages()[finding.page]


# --- the file to send on ---------------------------------------------------------------------------------------------


class Marked(HTMLParser):
    """The tags of a page, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[str] = []
        self._embeds = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._embeds = tag == "script" and dict(attrs).get("type") == "application/json"

    def handle_data(self, data: str) -> None:
        if self._embeds:
            self.data.append(data)


@given(text=st.text() | st.sampled_from(HOSTILE[:4]))
def test_no_text_leaves_its_place_in_the_file(text: str) -> None:
    empty, page = Marked(self_contained({"runs": []})), Marked(self_contained({"runs": [text]}))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in empty.tags]
    assert json.loads("".join(page.data)) == {"runs": [text]}


def test_the_file_needs_nothing_else_and_has_no_secret(tmp_path: Path) -> None:
    make_run(tmp_path / "run", texts=HOSTILE)
    said: list[str] = []
    export([tmp_path / "run"], tmp_path / "out" / "view.html", said.append)
    text = (tmp_path / "out" / "view.html").read_text("utf-8")
    page = Marked(text)
    assert not [attrs for _, attrs in page.tags if "src" in attrs or "href" in attrs]
    policy = next(attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs) or ""
    assert "default-src 'none'" in policy and policy.count("sha256-") == 8
    assert "hunter2" not in text and not re.search(r"https?://", re.sub(r"<script.*?</script>", "", text, flags=re.S))
    data = json.loads("".join(page.data))
    assert data.pop("pages").keys() == set(PAGES)  # which name addresses, as text
    assert not re.search(r"https?://", json.dumps(data))
    (run,) = data["runs"]
    assert run["name"] == "run" and len(run["kept"]["train"]) == 72 and run["prompts"]["train"][0]["uid"] == "row0"
    assert said[0].startswith(f"wrote {tmp_path / 'out' / 'view.html'}")
    with pytest.raises(TandemError, match="exists: choose another name"):
        export([tmp_path / "run"], tmp_path / "out" / "view.html", said.append)


def test_a_file_has_whole_steps_from_first_to_last(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20, groups=2, n=2)
    steps = [row["step"] for row in exported_samples(SampleIndex(run), "train", most=17)]
    assert sorted(set(steps)) == [1, 5, 10, 20] and all(steps.count(step) == 4 for step in steps)


def test_a_file_is_written_without_what_cannot_be_read_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    spoil(run)
    whole = pq.read_table(run / "samples" / "eval-00000002.parquet")
    pq.write_table(whole.drop_columns(["notes"]), run / "samples" / "eval-00000002.parquet")  # which no list asks for
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    said: list[str] = []
    export([run], tmp_path / "view.html", said.append)
    assert {row["step"] for row in exported_samples(SampleIndex(run), "train")} == {4}
    names = ["metrics.jsonl", "eval-00000002.parquet", *(f"train-0000000{step}.parquet" for step in (1, 2, 3))]
    assert [line.split(": ")[2].split(" ")[0] for line in said[:-1]] == names


def test_files_of_runs_that_did_not_mark_what_was_inserted_are_still_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    (part, *_) = parts_in(folder)
    pq.write_table(pq.read_table(part.path).drop_columns(["inserted"]), part.path)
    index = SampleIndex(folder)
    assert index.group(part.kind, part.step, 0) and not index.left_out()
