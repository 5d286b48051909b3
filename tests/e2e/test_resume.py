"""A run that was killed goes on as if it hadn't been: same weights, same lines, no prompt lost or trained twice."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.base.errors import ConfigError, DataError
from tandem.control.colocate import train_colocate
from tandem.control.entry import LOOPS
from tandem.models.fingerprint import fingerprint
from tandem.observe.metrics import read_rows
from tandem.session.session import Session
from tandem.train.checkpoint import open_checkpoint
from tests.e2e.seven import Run, equal, prepare, started, train, training_engine, training_rank, write_rows

TIMES = ("time/", "cpu/", "throughput/", "limit/", "system/")


class Killed(BaseException):
    """What ends the process, as far as the run is concerned."""


@pytest.fixture(scope="module")
def words(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """8 rows, batch 4, 2 epochs: 4 steps; a checkpoint after step 2 falls on the boundary of the epochs."""
    rows = [{"prompt": f"{d}>", "answer": str(d) * 4} for d in range(8)]
    return (
        str(task),
        f"data.train_files=[{write_rows(tmp_path_factory.mktemp('rows') / 'rows.jsonl', rows)}]",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.schedule=linear",
        "actor_rollout_ref.ref.update_interval=3",
        "algorithm.kl.in=reward",
        "algorithm.kl.coef=0.05",
        "algorithm.kl.controller=adaptive",
        "algorithm.kl.horizon=100",
        "trainer.total_steps=null",
        "trainer.total_epochs=2",
        "trainer.save_interval=1",
        "trainer.keep_checkpoints=9",
        "trainer.rollouts_per_step=4",
    )


@pytest.fixture(scope="module")
def whole(words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Never interrupted."""
    return train(*words, f"trainer.output_dir={tmp_path_factory.mktemp('whole')}")


def killed_in(part: str, step: int, *words: str) -> None:
    """Run until the ``part`` of ``step`` (from 1), and no further; its update is done when it is published."""
    done = step if part == "publishing" else step - 1
    with started(*words) as session:
        owner, name = {
            "rollout": (session.composite.engine, "generate"),
            "training": (training_engine(session), "optim_step"),
            "publishing": (session.composite.engine, "load"),
        }[part]
        inner = getattr(owner, name)

        def until(*arguments: Any) -> Any:
            if session.run.progress.step == done and (part != "publishing" or arguments[1] == step):
                raise Killed
            return inner(*arguments)

        setattr(owner, name, until)
        with pytest.raises(Killed):
            train_colocate(session)
        assert session.run.progress.step == done


def lines(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in run.rows]


def assert_same(run: Run, whole: Run) -> None:
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert lines(run) == lines(whole)
    assert Counter(prompt for step in run.prompts for prompt in step) == {f"{d}>": 2 for d in range(8)}
    assert run.prompts == whole.prompts
    assert equal(run.weights, whole.weights)


@pytest.mark.parametrize(
    ("part", "step"), [("training", 1), ("rollout", 3), ("training", 3), ("publishing", 3), ("rollout", 4)]
)
def test_b68_a_killed_run_goes_on_as_if_nothing_had_been(
    words: tuple[str, ...], whole: Run, tmp_path: Path, part: str, step: int
) -> None:
    words = (*words, f"trainer.output_dir={tmp_path}", "trainer.resume=auto")
    killed_in(part, step, *words)
    run = train(*words)
    assert_same(run, whole)
    resumed = {row["step"]: row["limit/resumed_after"] for row in run.rows if "limit/resumed_after" in row}
    assert resumed == ({step: step - 1} if step > 1 else {})


def test_b67_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next(
    words: tuple[str, ...], whole: Run, tmp_path: Path
) -> None:
    words = (*words, f"trainer.output_dir={tmp_path}", "trainer.save_interval=2", "trainer.resume=auto")
    killed_in("training", 4, *words)  # step 3 is lost and done again
    assert whole.rows[0]["updates"] == 0  # saved before the first update there, not here: saving changes nothing
    session = prepare(*words)
    assert (session.run.progress.step, session.run.progress.last) == (2, 4)
    session.rewards.close()
    assert_same(train(*words), whole)


def test_b70_restored_weights_are_published_before_the_loop(words: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    for late in ("step_00000003", "step_00000004"):
        shutil.rmtree(tmp_path / "checkpoints" / late)
    seen: list[tuple[int, int | None]] = []
    with started(*words, f"trainer.output_dir={tmp_path}", "trainer.resume=auto") as session:
        fill = session.rollout.fill

        def filled(partition: int) -> None:
            seen.append((session.composite.engine.version, session.rollout.filler._gate.published))
            fill(partition)

        session.rollout.fill = filled  # type: ignore[method-assign]
        train_colocate(session)
    assert seen == [(2, 2), (3, 3)]


def test_b37_after_a_resume_the_engine_generates_with_the_actor_and_not_the_reference(
    words: tuple[str, ...], whole: Run, tmp_path: Path
) -> None:
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    for late in ("step_00000003", "step_00000004"):
        shutil.rmtree(tmp_path / "checkpoints" / late)

    def prints(session: Session[Any]) -> str:
        return fingerprint(session.composite.model.model.named_parameters())

    with started(*words, f"trainer.output_dir={tmp_path}", "trainer.resume=auto") as session:
        restored = prints(session)
        with training_rank(session).weights.using("ref"):
            assert prints(session) != restored
            with pytest.raises(Exception, match="'ref' is in place"):
                session.weights.push(3)
        assert prints(session) == restored
    assert "mismatch/abs" in whole.rows[3]
    assert max(whole.column("mismatch/abs")) < 1e-4


def test_b72_a_save_that_was_killed_is_passed_over(words: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    root = tmp_path / "checkpoints"
    shutil.rmtree(root / "step_00000004")
    (root / "step_00000003").rename(root / ".step_00000003.partial")
    session = prepare(*words, f"trainer.output_dir={tmp_path}", "trainer.resume=auto")
    assert session.run.progress.step == 2
    session.rewards.close()


@pytest.mark.parametrize("file", ["state.json", "tensors/rank_00000_0000.safetensors", "model/config.json"])
def test_damage_of_the_newest_checkpoint_ends_a_resume_and_changes_nothing(
    words: tuple[str, ...], whole: Run, tmp_path: Path, file: str
) -> None:
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "checkpoints" / "step_00000004" / file
    damaged.write_bytes(damaged.read_bytes()[:-3])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=f"{damaged}: is damaged.*trainer.resume=.*step_00000003"):
        prepare(*words, f"trainer.output_dir={tmp_path}", "trainer.resume=auto")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_named_checkpoint_may_start_another_folder(words: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    saved = whole.output / "checkpoints" / "step_00000002"
    run = train(*words, f"trainer.output_dir={tmp_path}", f"trainer.resume={saved}")
    assert [row["step"] for row in run.rows] == [3, 4]
    assert lines(run) == lines(whole)[2:]
    assert equal(run.weights, whole.weights)


def test_samples_are_counted_over_all_parts_of_a_run(words: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    saved = whole.output / "checkpoints" / "step_00000002"
    run = train(*words, f"trainer.output_dir={tmp_path}", f"trainer.resume={saved}")
    told = run.session.run.progress.samples
    assert told == whole.session.run.progress.samples == "produced 64, trained 64, dropped 0, left in the queue 0"


def test_a_run_that_is_done_has_nothing_left_to_do(words: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    assert_same(train(*words, f"trainer.output_dir={tmp_path}", "trainer.resume=auto"), whole)


def test_more_epochs_go_on_from_there(words: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    run = train(*words, f"trainer.output_dir={tmp_path}", "trainer.resume=auto", "trainer.total_epochs=3")
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    assert Counter(prompt for step in run.prompts for prompt in step) == {f"{d}>": 3 for d in range(8)}


def test_checkpoints_of_an_earlier_run_are_not_taken_for_ones_own(
    words: tuple[str, ...], whole: Run, tmp_path: Path
) -> None:
    """A new run in a used folder keeps its own checkpoints, and resumes from them."""
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    words = (*words, f"trainer.output_dir={tmp_path}", "trainer.keep_checkpoints=1")
    killed_in("training", 3, *words)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    old = tmp_path.with_name(f"{tmp_path.name}.1")
    assert len(list((old / "checkpoints").iterdir())) == 4 and (old / "final").is_dir()
    assert_same(train(*words, "trainer.resume=latest"), whole)
    back = train(*words, f"trainer.resume={old / 'checkpoints' / 'step_00000003'}")
    assert [row["step"] for row in back.rows] == [4]
    assert equal(back.weights, whole.weights)
    assert (tmp_path.with_name(f"{tmp_path.name}.2") / "final").is_dir()


def test_going_back_keeps_what_was_trained_from_there(words: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.output, tmp_path, dirs_exist_ok=True)
    words = (*words, f"trainer.output_dir={tmp_path}")
    assert_same(train(*words, f"trainer.resume={tmp_path / 'checkpoints' / 'step_00000002'}"), whole)
    assert [path.name for path in (tmp_path / "checkpoints.1").iterdir()] == ["step_00000003", "step_00000004"]
    assert (tmp_path / "final.1" / "config.json").is_file() and len(read_rows(tmp_path / "metrics.1.jsonl")) == 4


@pytest.mark.parametrize("kind", ["nothing", "steps without a checkpoint"])
def test_a_resume_that_finds_nothing_says_what_is_there(
    words: tuple[str, ...], whole: Run, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*words, f"trainer.output_dir={tmp_path / 'run'}")
    if kind != "nothing":
        shutil.copytree(whole.output, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="there is no checkpoint in") as raised:
        prepare(*words, "trainer.resume=latest")
    told = "there are 4 steps in metrics.jsonl and a trained model in final/"
    assert (told in str(raised.value)) == (kind != "nothing")
    with pytest.raises(ConfigError, match="it names no checkpoint"):
        prepare(*words, "trainer.resume=")
    assert sorted(tmp_path.rglob("*")) == before
    prepare(*words, "trainer.resume=auto").rewards.close()
    said = capsys.readouterr().out
    assert "so the run begins anew" in said
    assert ("was moved to" in said) == (tmp_path / "run.1" / "final").is_dir() == (kind != "nothing")


def test_what_does_not_fit_the_checkpoint_is_refused(words: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    saved = f"trainer.resume={whole.output / 'checkpoints' / 'step_00000004'}"
    out = f"trainer.output_dir={tmp_path / 'out'}"
    with pytest.raises(ConfigError, match="step 4, the run ends at step 2"):
        prepare(*words, out, saved, "trainer.total_steps=2")
    rows = write_rows(tmp_path / "other.jsonl", [{"prompt": f"{d}>", "answer": "1"} for d in (1, 1, 2, 3, 4, 5, 6, 7)])
    with pytest.raises(DataError, match="not those of the saved run"):
        prepare(*words, out, saved, f"data.train_files=[{rows}]")
    with pytest.raises(ConfigError, match="lora_rank = 2: the saved run has 0"):
        prepare(*words, out, saved, "actor_rollout_ref.model.lora_rank=2")
    with pytest.raises(ConfigError, match="is not a finished checkpoint"):
        prepare(*words, out, f"trainer.resume={whole.output / 'final'}")


def test_the_coefficient_saved_is_of_the_trained_partition_however_far_ahead_its_role_is(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    ahead = "execution={mode: fully_async, max_staleness: 2}"
    with started(*words, f"trainer.output_dir={tmp_path}", ahead) as session:
        engine = training_engine(session)
        step = engine.optim_step

        def slow(denominator: float) -> Any:
            time.sleep(0.3)  # in which the advantages of the next partitions are computed
            return step(denominator)

        engine.optim_step = slow  # type: ignore[method-assign]
        LOOPS["fully_async"](session)
    rows = read_rows(tmp_path / "metrics.jsonl")
    used = [row["kl/coef"] for row in rows]
    assert len(set(used)) == 4
    saved = [open_checkpoint(path).read()["kl"]["coef"] for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert saved[:3] == pytest.approx(used[1:])


DRAWING = """
import random
import numpy, torch

def drawing(response, ground_truth):
    return random.random() + numpy.random.rand() + float(torch.rand(()))
"""


def test_global_generators_go_on_where_they_were(words: tuple[str, ...], tmp_path: Path) -> None:
    """A plug-in that draws from them gives a resumed run what it gave one that was never interrupted."""
    scorer = tmp_path / "drawing.py"
    scorer.write_text(DRAWING)
    own = (*words, "reward_manager.type=drawing", f"reward_manager.file={scorer}", "trainer.save_interval=2")
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    uninterrupted = train(*own, f"trainer.output_dir={tmp_path / 'whole'}")
    torch.manual_seed(6), random.seed(6), np.random.seed(6)
    saved = tmp_path / "whole" / "checkpoints" / "step_00000002"
    resumed = train(*own, f"trainer.output_dir={tmp_path / 'more'}", f"trainer.resume={saved}")
    assert resumed.rewards == uninterrupted.rewards[2:]
    assert equal(resumed.weights, uninterrupted.weights)
