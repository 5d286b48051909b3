from __future__ import annotations

import math
import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.run_folder import begin
from tandem.columns.proto import DataProto
from tandem.config.trainer import SamplesConfig, TrainerConfig
from tandem.observe.run_log import RunLog
from tandem.observe.samples import store
from tandem.observe.samples.parts import Kind, Part, parts_in, write_part
from tandem.observe.samples.store import SampleStore
from tandem.observe.samples.table import sample_table
from tandem.observe.samples.thinning import thinned
from tandem.observe.trackers import RunInfo
from tandem.session.progress import Progress
from tandem.session.run import Run
from tests.observe.sample_batches import scored
from tests.runs.test_rescue import Disk

NAN = math.nan


class Kept(SampleStore):
    """A store that has written what it took when ``keep`` returns."""

    def keep(self, kind: Kind, step: int, batch: DataProto) -> None:
        super().keep(kind, step, batch)
        self.settle()


def steps(output_dir: Path, kind: str = "train") -> list[int]:
    return [part.step for part in parts_in(output_dir) if part.kind == kind]


def test_a_sample_tells_what_became_of_it() -> None:
    batch = scored(
        ["ab", "abc"], [0.5, NAN], failures=["", "ValueError: no"], notes=[{"reply": "good"}, {}], version=3,
        advantages=[1.5, -1.5],
    )  # fmt: skip
    first, second = sample_table(batch, 5, "train").to_pylist()
    assert first["prompt"] == "prompt 0" and first["response"] == "ab" and first["ground_truth"] == "0"
    assert (first["reward"], first["counted"], first["failure"]) == (0.5, True, None)
    assert dict(first["scores"]) == {"strict": 0.5} and dict(first["notes"]) == {"reply": "good"}
    assert (first["advantage"], first["trained_tokens"], first["length"]) == (1.5, 2, 2)
    assert (first["version"], first["version_max"], first["lag"]) == (3, 3, 1)
    assert (second["reward"], second["counted"], second["failure"]) == (None, False, "ValueError: no")
    assert second["sample"] == 1 and second["group"] == 0


def test_an_evaluation_has_neither_lag_nor_advantage() -> None:
    (row,) = sample_table(scored(["ab"], [1.0], version=4), 4, "eval").to_pylist()
    assert (row["kind"], row["version"], row["lag"], row["advantage"], row["trained_tokens"]) == (
        "eval",
        4,
        None,
        None,
        0,
    )


def test_an_empty_answer_has_no_version() -> None:
    row = sample_table(scored(["", "a"], [0.0, 1.0], advantages=[1.0, 2.0]), 1, "train").to_pylist()[0]
    assert (row["version"], row["lag"], row["advantage"], row["length"]) == (None, None, None, 0)


def test_tokens_come_with_their_text_and_log_probs_where_asked_for() -> None:
    batch = scored(["a b"], [1.0])
    assert "tokens" not in sample_table(batch, 1, "train").column_names
    (row,) = sample_table(batch, 1, "train", tokens=True).to_pylist()
    assert row["tokens"] == ["a", " ", "b"] and row["logprobs"] == [-0.5] * 3 and row["old_logprobs"] is None
    assert row["token_ids"] == [97, 32, 98]


def test_what_an_episode_was_told_is_marked() -> None:
    batch = scored(["ab(3)c", "[]d", "e"], [1.0] * 3)
    said = [letter not in "(3)[]" for letter in "ab(3)c[]de"]
    batch.batch["response_mask"] = batch.ragged("response_mask").like(torch.tensor(said))
    rows = sample_table(batch, 1, "train", tokens=True).to_pylist()
    assert [row["inserted"] for row in rows] == [[2, 5], [0, 2], []]
    assert rows[0]["sampled"] == [True, True, False, False, False, True]


def test_secrets_of_rows_and_judges_are_not_written() -> None:
    batch = scored(
        ["a"], [NAN], failures=["https://me:hunter2@judge/ answers nothing"],
        notes=[{"reply": "my key is sk-abcdefgh12345678"}],
    )  # fmt: skip
    written = str(sample_table(batch, 1, "train").to_pylist())
    assert "a secret" not in written and "hunter2" not in written and "sk-abc" not in written
    assert "answers nothing" in written and "my key is" in written


@given(text=st.text(alphabet=st.characters(), max_size=30))
def test_any_answer_can_be_written_and_read(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("run")
    Kept(folder, SamplesConfig(tokens=True)).keep("train", 1, scored([text], [1.0]))
    (row,) = pq.read_table(parts_in(folder)[0].path).to_pylist()
    assert row["response"] == text.encode("utf-8", "backslashreplace").decode()


def test_every_n_th_step_is_kept_and_every_evaluation(tmp_path: Path) -> None:
    kept_in = Kept(tmp_path, SamplesConfig(every=3))
    for step in range(1, 8):
        kept_in.keep("train", step, scored(["a", "b"], [0.0, 1.0]))
        kept_in.keep("eval", step, scored(["a"], [0.0]))
    assert steps(tmp_path) == [3, 6]
    assert steps(tmp_path, "eval") == [1, 2, 3, 4, 5, 6, 7]


def test_none_are_kept_where_none_are_asked_for(tmp_path: Path) -> None:
    Kept(tmp_path, SamplesConfig(every=0)).keep("train", 1, scored(["a"], [0.0]))
    assert not list(tmp_path.iterdir())


def test_a_resume_drops_later_parts_and_what_a_kill_cut(tmp_path: Path) -> None:
    kept_in = Kept(tmp_path, SamplesConfig())
    for step in range(1, 6):
        kept_in.keep("train", step, scored(["a"], [0.0]))
        kept_in.keep("eval", step, scored(["a"], [0.0]))
    (tmp_path / "samples" / ".train-00000006.parquet.partial").write_bytes(b"PAR1")
    Kept(tmp_path, SamplesConfig(), resumed_step=3)
    assert steps(tmp_path) == steps(tmp_path, "eval") == [1, 2, 3]
    assert len(list((tmp_path / "samples").iterdir())) == 6


def test_a_resume_from_an_older_checkpoint_sets_later_parts_aside(tmp_path: Path) -> None:
    begin(tmp_path)
    kept_in = Kept(tmp_path, SamplesConfig())
    for step in range(1, 5):
        kept_in.keep("train", step, scored(["a"], [0.0]))
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    assert "samples.1" in begin(tmp_path, goes_on_after=2, to=4)[0]
    assert steps(tmp_path) == [1, 2]
    assert sorted(os.listdir(tmp_path / "samples.1")) == ["train-00000003.parquet", "train-00000004.parquet"]


def test_a_new_run_moves_the_samples_of_the_old_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run)
    Kept(run, SamplesConfig()).keep("train", 1, scored(["a"], [0.0]))
    begin(run)
    assert not parts_in(run) and steps(tmp_path / "run.1") == [1]


def test_a_part_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    kept_in = Kept(tmp_path, SamplesConfig())
    kept_in.keep("train", 1, scored(["a"], [0.0]))
    monkeypatch.setattr(os, "replace", full)
    kept_in.keep("train", 2, scored(["a"], [0.0]))
    assert steps(tmp_path) == [1]
    assert "samples of step 2 were not written (the run goes on)" in caplog.text


def test_the_loop_goes_on_while_samples_are_written_and_its_end_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_up, free = threading.Event(), threading.Event()

    def slow(*args: object, **more: object) -> object:
        taken_up.set()
        assert free.wait(60)
        return write_part(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "write_part", slow)
    with RunLog(RunInfo(tmp_path), samples=SamplesConfig()) as log:
        for step in (1, 2, 3):
            log.keep_samples("train", step, scored(["a"], [0.0]))
        assert taken_up.wait(60) and not steps(tmp_path)
        free.set()
    assert steps(tmp_path) == [1, 2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name == "samples"]


def test_a_disk_that_takes_nothing_costs_samples_and_names_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()
    monkeypatch.setattr(store, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(store, "write_part", lambda *args: free.wait(60) and write_part(*args))
    slow = SampleStore(tmp_path, SamplesConfig())
    for step in range(1, 6):
        slow.keep("train", step, scored(["a"], [0.0]))
    slow.settle()
    assert "samples of step 5 were not written" in caplog.text and f"{tmp_path} has taken nothing" in caplog.text
    assert "the last samples are not written yet" in caplog.text
    monkeypatch.setattr(store, "_PATIENCE_S", 60.0)
    free.set()
    slow.settle()
    assert 3 <= len(steps(tmp_path)) < 5 and steps(tmp_path)[0] == 1


def test_a_checkpoint_waits_for_the_samples_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: object) -> object:
        time.sleep(0.1)
        return write_part(*args)  # type: ignore[arg-type]

    def save(root: Path, step: int, **more: object) -> None:
        assert steps(tmp_path) == [1]

    monkeypatch.setattr(store, "write_part", slow)
    with RunLog(RunInfo(tmp_path), samples=SamplesConfig()) as log:
        log.keep_samples("train", 1, scored(["a"], [0.0]))
        Run(TrainerConfig(), log, Progress(1, 2), tmp_path, Disk(tmp_path / "none", "model"), save).save(1)


def test_samples_that_arrow_refuses_or_nobody_can_remove_end_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train-00000009.parquet", ".train-00000001.parquet.partial"):  # folders: no unlink removes them
        (tmp_path / "samples" / name).mkdir(parents=True)
    kept_in = Kept(tmp_path, SamplesConfig(), resumed_step=3)
    assert caplog.text.count("were not removed (the run goes on)") == 2
    kept_in.keep("train", 1 << 40, scored(["a"], [0.0]))  # no 32-bit step: an error of Arrow's own
    assert "were not written (the run goes on)" in caplog.text


# --- the budget ------------------------------------------------------------------------------------------------------

SIZES = st.dictionaries(st.integers(1, 200), st.integers(1, 50), min_size=1, max_size=60)


@given(sizes=SIZES, budget=st.integers(0, 2000))
def test_what_stays_fits_and_has_the_newest(sizes: dict[int, int], budget: int) -> None:
    gone = thinned(sizes, budget)
    kept = sizes.keys() - set(gone)
    assert len(set(gone)) == len(gone) and max(sizes) in kept
    assert sum(sizes[step] for step in kept) <= budget or kept == {max(sizes)}
    if gone:  # nothing goes that could have stayed
        assert sum(sizes[step] for step in kept) + sizes[gone[-1]] > budget


@given(count=st.integers(3, 300), room=st.integers(3, 40))
def test_older_steps_are_thinned_evenly(count: int, room: int) -> None:
    kept: dict[int, int] = {}
    for step in range(1, count + 1):
        kept[step] = 1
        for gone in thinned(kept, room):
            del kept[gone]
    steps = sorted(kept)
    assert len(steps) == min(count, room) and steps[0] == 1 and steps[-1] == count
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert max(gaps) <= 4 * count / room + 1


def test_the_budget_thins_older_steps_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept_in = Kept(tmp_path, SamplesConfig(max_mb=1))
    noise = "".join(chr(0x4E00 + (i * 7919) % 20000) for i in range(60_000))
    for step in range(1, 20):
        kept_in.keep("train", step, scored([noise[step * 7 :]], [0.0]))
        kept_in.keep("eval", step, scored(["a"], [0.0]))
    kept = steps(tmp_path)
    assert kept[0] == 1 and kept[-1] == 19 and 2 < len(kept) < 19
    assert len(steps(tmp_path, "eval")) == 19
    assert sum(part.path.stat().st_size for part in parts_in(tmp_path)) <= 1_000_000
    assert caplog.text.count("older steps are thinned out evenly") == 1


def test_files_of_others_are_no_parts(tmp_path: Path) -> None:
    Kept(tmp_path, SamplesConfig()).keep("train", 1, scored(["a"], [0.0]))
    for name in ("notes-00000001.parquet", "train-1.csv", "mine.parquet"):
        (tmp_path / "samples" / name).touch()
    assert parts_in(tmp_path) == [Part("train", 1, tmp_path / "samples" / "train-00000001.parquet")]


def test_what_the_turns_of_an_episode_were_worth_stands_beside_the_other_scores() -> None:
    batch = scored(["ab", "c"], [1.0, 0.0])
    played = [{"turn_rewards": [0.5, 2.0]}, {"turns": 1}]
    table = sample_table(batch.union(DataProto({}, {"episode": played})), 1, "train")
    assert [dict(one) for one in table["scores"].to_pylist()] == [
        {"strict": 1.0, "turn 1": 0.5, "turn 2": 2.0},
        {"strict": 0.0},
    ]
