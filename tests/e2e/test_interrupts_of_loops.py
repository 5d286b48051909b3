"""SIGINT and SIGTERM in the loops that stream, compare or fine-tune: what is done is kept, and goes on exactly."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import pytest

import tandem.train.checkpoint
from tandem import BaseDataSource, BaseTrainer, load_model
from tandem.base import interrupts
from tandem.config.load import load_words
from tandem.config.schema import SftConfig
from tandem.data.preferences import PreferenceSource
from tandem.models.tokenizer import load_tokenizer
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.roles.actor import Actor
from tandem.roles.train_rank import TrainRank
from tandem.session.keep.exports import Exporter, PlainExport
from tandem.session.samples import Samples
from tandem.session.stage_table import StageTable
from tandem.session.weights import PushedWeights
from tandem.train import saved
from tandem.train.engine import FsdpEngine
from tandem.train.updater import Updater
from tests.e2e.interrupting import CODES, Instant, interrupted_at, run, trained
from tests.e2e.seven import write_rows

ROOT = Path(__file__).parents[2]
STREAMING = "max_staleness: 0, num_iters_per_train_update: 2"
COMMON = ("trainer.total_steps=3", "trainer.save_interval=2", "trainer.exact=true", "trainer.rollouts_per_step=0")
SMALL = (*COMMON, "data.train_batch_size=4", "algorithm.kl={in: loss, coef: 0.05}", "actor_rollout_ref.rollout.n=8")
IN_A_SAVE = {
    "the tensors of a save": (tandem.train.checkpoint, "write_tensors", 1, 2),
    "the end of a save": (tandem.train.checkpoint, "write_manifest", 1, 2),
}
STREAMED: dict[str, Instant] = {
    "the first parts": (Samples, "arriving", 1, 0),
    "training": (Actor, "step", 2, 2),
    "publishing": (PushedWeights, "push", 3, 2),
    "the final export": (Exporter, "write", 3, 3),
    **IN_A_SAVE,
}
SERVED = {name: instant for name, instant in STREAMED.items() if name != "the first parts"}
COMPARED: dict[str, Instant] = {
    "reading": (PreferenceSource, "take", 2, 1),
    "the reference": (StageTable, "forward", 2, 1),
    "an optimizer step": (TrainRank, "optim_step", 2, 2),
    "the final export": (Exporter, "write", 3, 3),
    **IN_A_SAVE,
}
LOOPS = {"hybrid": STREAMED, "fully_async": {"reading": (Samples, "complete", 2, 1), **SERVED}, "preference": COMPARED}
CASES = [(loop, name) for loop, instants in LOOPS.items() for name in instants]


@pytest.fixture(scope="module")
def words(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """Of each loop."""
    pairs = [{"prompt": f"{d}>", "chosen": str(d) * 4, "rejected": str(9 - d) * 4} for d in range(10)]
    file = write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", pairs)
    compared = (f"data.train_files=[{file}]", "algorithm={policy_loss: {type: dpo}}", "data.max_response_length=5")
    return {
        "hybrid": (str(task), f"execution={{mode: hybrid, {STREAMING}}}", *SMALL),
        "fully_async": (str(task), f"execution={{mode: fully_async, {STREAMING}}}", *SMALL),
        "preference": (str(task), *COMMON, *compared, "data.train_batch_size=2"),
    }


@pytest.fixture(scope="module")
def whole(words: dict[str, tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The fingerprint of what an uninterrupted run of each loop trains."""
    found = {}
    for loop, own in words.items():
        output = tmp_path_factory.mktemp(loop)
        result = run("train", *own, f"trainer.output_dir={output}")
        assert result.exit_code == 0, result.output
        found[loop] = trained(output)
    return found


TUNED: dict[str, Instant] = {
    "an optimizer step": (FsdpEngine, "optim_step", 2, 2),
    "the final export": (Exporter, "write", 2, 3),
    **IN_A_SAVE,
}


@pytest.fixture(scope="module")
def tuned(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """The words of a fine-tuning, and the fingerprint of what it trains."""
    place = tmp_path_factory.mktemp("sft")
    rows = write_rows(place / "rows.jsonl", [{"prompt": f"{d}>", "response": str(d) * 4} for d in range(8)])
    words = [
        "sft", f"model.path={task.parent / 'model'}", f"data.train_files=[{rows}]", "data.train_batch_size=4",
        "data.max_length=16", "trainer.logger=[]", "trainer.total_steps=3", "trainer.save_interval=2",
    ]  # fmt: skip
    assert run(*words, f"trainer.output_dir={place / 'run'}").exit_code == 0
    return words, trained(place / "run")


@pytest.mark.parametrize("name", TUNED)
def test_fine_tuning_too(
    tuned: tuple[list[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (words, whole), number = tuned, list(CODES)[list(TUNED).index(name) % 2]
    with monkeypatch.context() as patched:
        interrupted_at(TUNED[name], number, patched)
        result = run(*words, f"trainer.output_dir={tmp_path}")
    assert result.exit_code == CODES[number][0], result.output
    (line,) = result.stderr.splitlines()
    again = shlex.split(line.partition("with: ")[2])
    assert [step for step, _ in saved.checkpoints_in(tmp_path / "checkpoints")][-1] == TUNED[name][3]
    assert again[-1] == "--resume" and run(*again[1:]).exit_code == 0
    assert [row["step"] for row in read_rows(tmp_path / METRICS_FILE)] == [1, 2, 3]
    assert trained(tmp_path) == whole


class Digits(BaseDataSource):
    def get_train_dataset(self) -> list[dict[str, str]]:
        return [{"text": f"{d}>{d * 1111}"} for d in range(10)]


def own_trainer(task: Path, output: Path) -> BaseTrainer:
    words = [f"model.path={task.parent / 'model'}", "data.train_batch_size=2", "data.max_length=8", "trainer.logger=[]"]
    trainer = BaseTrainer(load_words([*words, f"trainer.output_dir={output}"], SftConfig))
    trainer.model, trainer.tokenizer = load_model(task.parent / "model"), load_tokenizer(task.parent / "model")
    return trainer


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize(
    ("instant", "done"), [((Updater, "step", 3, 0), 3), ((PlainExport, "write", 1, 0), 5)], ids=["training", "the end"]
)
def test_a_trainer_of_ones_own_ends_in_one_line(
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    instant: Instant,
    done: int,
) -> None:
    """SIGINT stays an exception that the program may catch, and of which Python prints nothing more if it doesn't."""
    trainer, handlers = own_trainer(task, tmp_path / "run"), [signal.getsignal(each) for each in CODES]
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    capsys.readouterr()
    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        interrupted_at(instant, number, patched)
        trainer.fit(Digits())
    assert caught.type is (KeyboardInterrupt if number == signal.SIGINT else SystemExit)
    assert number == signal.SIGINT or caught.value.code == 143  # type: ignore[union-attr]
    told = capsys.readouterr().err
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert told == f"{CODES[number][1]}: {done} of 5 steps are done, and none is kept\n"
    assert number == signal.SIGTERM or not capsys.readouterr().err
    assert [signal.getsignal(each) for each in CODES] == handlers
    assert not list(tmp_path.rglob("*.partial*")) and not (tmp_path / "run" / "final").exists()


@pytest.fixture(autouse=True)
def no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes long is told while it ends; here none does, however busy the machine is."""
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 600.0)


@pytest.mark.parametrize(("loop", "name"), CASES)
def test_every_loop_keeps_what_is_done_and_goes_on_exactly(
    words: dict[str, tuple[str, ...]],
    whole: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loop: str,
    name: str,
) -> None:
    number = list(CODES)[CASES.index((loop, name)) % 2]
    code, word = CODES[number]
    instant = LOOPS[loop][name]
    with monkeypatch.context() as patched:
        interrupted_at(instant, number, patched)
        result = run("train", *words[loop], f"trainer.output_dir={tmp_path}")
    assert result.exit_code == code, result.output
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert line.startswith(word), line
    steps = [step for step, _ in saved.checkpoints_in(tmp_path / "checkpoints")]
    assert (steps[-1] if steps else 0) == instant[3]
    assert not list(tmp_path.rglob("*.partial*"))
    again = shlex.split(line.partition("with: ")[2])
    result = run(*again[1:])
    assert result.exit_code == 0, result.output
    assert [row["step"] for row in read_rows(tmp_path / METRICS_FILE)] == [1, 2, 3]
    assert trained(tmp_path) == whole[loop]
