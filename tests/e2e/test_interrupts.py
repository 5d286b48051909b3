"""SIGINT and SIGTERM at every kind of instant: one line, the exit code, a checkpoint, a run that goes on exactly."""

from __future__ import annotations

import errno
import os
import shlex
import signal
from pathlib import Path

import pytest

import tandem.control.entry
import tandem.train.checkpoint
from tandem.base import interrupts
from tandem.config.arguments import without_resume
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.roles.actor import Actor
from tandem.roles.evaluation import Evaluator
from tandem.roles.train_rank import TrainRank
from tandem.session.keep.exports import Exporter
from tandem.session.rollout import SharedRollout
from tandem.session.samples import Samples
from tandem.session.weights import SharedWeights
from tandem.train import saved
from tests.e2e.interrupting import CODES, Instant, interrupted_at, run, trained
from tests.e2e.seven import write_rows

LAST = 3

INSTANTS: dict[str, Instant] = {
    "start-up": (tandem.control.entry, "build_session", 1, 0),
    "generation of the first step": (SharedRollout, "fill", 1, 0),
    "generation": (SharedRollout, "fill", 2, 1),
    "reading a partition": (Samples, "complete", 2, 1),
    "training": (Actor, "step", 2, 2),
    "an optimizer step": (TrainRank, "optim_step", 2, 2),
    "publishing": (SharedWeights, "push", 3, 2),
    "evaluation": (Evaluator, "answers", 1, 2),
    "the tensors of a save": (tandem.train.checkpoint, "write_tensors", 1, 2),
    "the end of a save": (tandem.train.checkpoint, "write_manifest", 1, 2),
    "the model in a checkpoint": (Exporter, "write_parts", 1, 2),
    "the final export": (Exporter, "write", 3, 3),
}


@pytest.fixture(scope="module")
def words(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    held_out = write_rows(tmp_path_factory.mktemp("val") / "val.jsonl", [{"prompt": "3>", "answer": "3333"}])
    return [
        str(task), f"data.val_files=[{held_out}]", "data.drop_val_prompts=false", "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4", "evaluation.interval=2", f"trainer.total_steps={LAST}",
        "trainer.save_interval=2", "trainer.keep_checkpoints=9",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of what an uninterrupted run trains."""
    output = tmp_path_factory.mktemp("whole")
    assert run("train", *words, f"trainer.output_dir={output}").exit_code == 0
    return trained(output)


@pytest.fixture(autouse=True)
def no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes long is told while it ends; here none does, however busy the machine is."""
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 600.0)


@pytest.mark.parametrize("name", INSTANTS)
def test_an_interrupt_leaves_what_is_done_and_the_command_that_goes_on(
    words: list[str], whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    number = list(CODES)[list(INSTANTS).index(name) % 2]
    code, word = CODES[number]
    output, steps = tmp_path / "run", INSTANTS[name][3]
    handlers = [signal.getsignal(each) for each in CODES]
    with monkeypatch.context() as patched:
        interrupted_at(INSTANTS[name], number, patched)
        result = run("train", *words, f"trainer.output_dir={output}")
    assert result.exit_code == code, result.output
    assert [signal.getsignal(each) for each in CODES] == handlers
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(word), lines
    checkpoints = [step for step, _ in saved.checkpoints_in(output / "checkpoints")]
    assert (checkpoints[-1] if checkpoints else 0) == steps
    assert not list(output.rglob("*.partial*"))
    assert f"{steps} steps are saved in {output / 'checkpoints'}; go on with: " in lines[0] or steps == 0
    again = shlex.split(lines[0].partition("with: ")[2])
    assert again[0] == "tandem"
    assert run(*again[1:]).exit_code == 0
    assert [row["step"] for row in read_rows(output / METRICS_FILE)] == [1, 2, 3]
    assert trained(output) == whole


def test_a_checkpoint_at_an_interrupt_is_a_choice(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, f"trainer.output_dir={tmp_path}", "trainer.save_interval=0", "trainer.save_on_interrupt=false"]
    interrupted_at(INSTANTS["generation"], signal.SIGINT, monkeypatch)
    result = run("train", *words)
    assert result.exit_code == 130 and "before a step was saved; begin again with: tandem train" in result.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_without_intervals_an_interrupt_saves_too(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(INSTANTS["generation"], signal.SIGTERM, monkeypatch)
    result = run("train", *words, f"trainer.output_dir={tmp_path}", "trainer.save_interval=0")
    assert result.exit_code == 143 and "1 steps are saved" in result.stderr


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["run.yaml", "--resume", "a=1"], ["run.yaml", "a=1"]),
        (["run.yaml", "--resume"], ["run.yaml"]),
        (["--resume", "runs/x", "run.yaml"], ["run.yaml"]),
        (["--resume=auto", "--seed", "1"], ["--seed", "1"]),
        (["trainer.resume=auto", "resume.yaml"], ["resume.yaml"]),
        (["--trainer.resume", "auto", "--hybrid"], ["--hybrid"]),
    ],
)
def test_the_command_that_goes_on_says_once_from_where(given: list[str], kept: list[str]) -> None:
    assert without_resume(given) == kept


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_written_is_one_line_with_its_name(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The first model in a checkpoint can't be written: what was trained is kept beside the run's folder."""
    file = tmp_path / "run" / "checkpoints" / "somewhere"

    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(file))

    monkeypatch.setattr(Exporter, "write_parts", failing)
    result = run("train", *words, f"trainer.output_dir={tmp_path / 'run'}")
    assert result.exit_code == 1
    kept = f"The model of step 2 was written to {tmp_path / 'run-step-2'} instead"
    assert result.stderr == f"error: {file}: can't be written ({os.strerror(number)}). {kept}\n"
