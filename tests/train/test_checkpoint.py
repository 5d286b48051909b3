"""A checkpoint is whole or not seen, and training goes on from it as if never stopped."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.config.model import OptimConfig
from tandem.train import checkpoint
from tandem.train.best import BestKept, best_checkpoint
from tandem.train.objective import SftObjective
from tandem.train.saved import checkpoints_in

MakeAny = Callable[..., Any]


def write(root: Path, step: int, keep: int = 2) -> checkpoint.Checkpoint:
    tensors = {"actor": {"w": torch.full((3,), float(step)), "updates": step}}
    return checkpoint.save(root, step, tensors=tensors, facts={"cursor": [step, "a"]}, keep=keep)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    write(tmp_path, 4)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, found.read()) == (4, {"cursor": [4, "a"]})
    tensors = {"actor": {"w": torch.zeros(3), "updates": 0}}
    found.load_tensors(tensors)
    assert tensors["actor"]["updates"] == 4
    assert torch.equal(tensors["actor"]["w"], torch.full((3,), 4.0))


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9):
        write(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000009", "step_00000010"]
    assert (found := checkpoint.latest(tmp_path)) is not None
    assert found.step == 10


def test_the_best_stays_beside_the_last_few_until_there_is_a_better_one(tmp_path: Path) -> None:
    best = BestKept(tmp_path, "eval/reward")
    there: list[list[int]] = []
    for step, value in enumerate((0.1, 0.5, 0.2, 0.5, 0.3, 0.6, 0.0), 1):
        best.note(step, {"eval/reward": value})
        write(tmp_path, step, keep=1)
        there.append([number for number, _ in checkpoints_in(tmp_path)])
    assert there == [[1], [2], [2, 3], [2, 4], [2, 5], [6], [6, 7]]
    found = best_checkpoint(tmp_path)
    assert found is not None and (found.step, found.value, found.path.name) == (6, 0.6, "step_00000006")


VALUES = st.lists(st.one_of(st.integers(0, 3).map(float), st.just(float("nan"))), min_size=1, max_size=8)


@given(VALUES, st.data(), st.sampled_from(["eval/reward", "eval/loss"]))
def test_a_run_that_was_killed_and_goes_on_keeps_the_best_that_one_without_a_kill_keeps(
    values: list[float], data: st.DataObject, metric: str
) -> None:
    killed = data.draw(st.integers(1, len(values)))
    again = data.draw(st.integers(0, killed - 1))  # of the checkpoint that the run goes on from
    sign = -1 if metric == "eval/loss" else 1
    known = [(sign * value, -step) for step, value in enumerate(values, 1) if value == value]
    with TemporaryDirectory() as folder:
        root = Path(folder)

        def run(first: int, last: int) -> None:
            best = BestKept(root, metric, first - 1 or None)
            for step in range(first, last + 1):
                better = best.note(step, {metric: values[step - 1]})
                before = [value for value, at in known if -at < step]
                now = sign * values[step - 1]
                assert better == (now == now and all(now > value for value in before))
                (root / f"step_{step:08d}").mkdir(exist_ok=True)

        run(1, killed)
        run(again + 1, len(values))
        found = best_checkpoint(root)
        assert (found and found.step) == (-max(known)[1] if known else None)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    checkpoint.save(tmp_path, 1, tensors={"w": torch.ones(1)}, facts={"new": True}, keep=2)
    assert (found := checkpoint.latest(tmp_path)) is not None
    assert found.read() == {"new": True}


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_b72_what_a_killed_process_left_is_no_checkpoint(tmp_path: Path) -> None:
    whole = write(tmp_path, 2).path
    shutil.copytree(whole, tmp_path / ".step_00000003.partial")
    assert (found := checkpoint.latest(tmp_path)) is not None
    assert found.path == whole
    write(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]


LATER_DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no state": ("state.json", lambda file: file.unlink()),
    "half a state": ("state.json", lambda file: file.write_text(file.read_text()[:50])),
    "an empty state": ("state.json", lambda file: file.write_text("")),
    "3 bytes cut": ("state.json", lambda file: file.write_bytes(file.read_bytes()[:-3])),
    "no manifest": ("manifest.json", lambda file: file.unlink()),
    "half a manifest": ("manifest.json", lambda file: file.write_text(file.read_text()[:90])),
    "no tensors": ("tensors/rank_00000.json", lambda file: shutil.rmtree(file.parent)),
}


@pytest.mark.parametrize("name", LATER_DAMAGE)
def test_a_damaged_newest_checkpoint_is_named_and_no_other_is_taken_for_it(name: str, tmp_path: Path) -> None:
    """A finished folder was whole: what lacks now got lost, and the step before would be another run."""
    older, newer = write(tmp_path, 1).path, write(tmp_path, 2).path
    file, damage = LATER_DAMAGE[name]
    damage(newer / file)
    with pytest.raises(DataError, match=re.escape(str(newer / file))) as raised:
        checkpoint.latest(tmp_path)
    assert f"trainer.resume={older} (that of step 2 is then set aside)" in str(raised.value)
    (older / "state.json").unlink()
    with pytest.raises(DataError, match="there is no older one that is whole"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize("seed", range(24))
def test_one_flipped_bit_anywhere_is_found_and_its_file_named(seed: int, tmp_path: Path) -> None:
    draw, part = random.Random(seed), tmp_path / "part"
    (part / "deep").mkdir(parents=True)
    (part / "deep" / "file").write_bytes(b"something")
    tensors = {"actor": {"w": torch.randn(50, 3), "updates": 7}}
    saved = checkpoint.save(tmp_path, 1, tensors=tensors, facts={"a": [1, 2]}, keep=1, parts={"model": part})
    files = sorted(path for path in saved.path.rglob("*") if path.is_file())
    assert len(files) == 5
    file = files[seed % len(files)]
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    for find in (lambda: checkpoint.open_checkpoint(saved.path), lambda: checkpoint.latest(tmp_path)):
        with pytest.raises(DataError, match=re.escape(f"{file}: is damaged")):
            find()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = write(tmp_path, 1)
    broken, read = saved.path / "state.json", Path.open

    def failing(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(DataError, match=rf"{re.escape(str(broken))}: can't be read \(Input/output error\)"):
        checkpoint.latest(tmp_path)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    """Whatever lies in the folder: what is executed in a pickle leaves a trace here."""
    saved, trace = write(tmp_path, 1), tmp_path / "executed"
    evil = pickle.dumps(Evil(str(trace)))
    for name in (".metadata", "__0_0.distcp", "rank_00000.pkl"):
        (saved.path / "tensors" / name).write_bytes(evil)
    found = checkpoint.open_checkpoint(saved.path)
    found.load_tensors({"actor": {"w": torch.zeros(3), "updates": 0}})
    for file in (saved.path / "tensors").iterdir():
        file.write_bytes(evil)
    with pytest.raises(DataError):
        checkpoint.Checkpoint(saved.path, 1).load_tensors({"actor": {"w": torch.zeros(3), "updates": 0}})
    assert not trace.exists()
    pickle.loads(evil)
    assert trace.exists()


class Evil:
    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (self.trace,)


def test_a_checkpoint_with_a_pickle_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step_00000003"
    (folder / "tensors").mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"format": "tandem-checkpoint/1", "step": 3}))
    with pytest.raises(DataError, match=r"never read. Start a new run from its model: .*path=.*step_00000003/model"):
        checkpoint.open_checkpoint(folder)


def _save_and_die(root: str, syscall: int) -> None:
    """Kill this process at the n-th flush or rename of a save."""
    left = syscall

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    os.fsync = dying(os.fsync)  # type: ignore[assignment]
    Path.rename = dying(Path.rename)  # type: ignore[method-assign]
    Path.write_text = dying(Path.write_text)  # type: ignore[method-assign]
    write(Path(root), 2)
    os._exit(0)


def test_b72_a_kill_between_writes_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    fork = multiprocessing.get_context("fork")
    seen = set()
    for syscall in range(60):
        process = fork.Process(target=_save_and_die, args=(str(tmp_path), syscall))
        process.start()
        process.join(60)
        found = checkpoint.latest(tmp_path)
        assert found is not None
        assert found.read() == {"cursor": [found.step, "a"]}
        found.load_tensors({"actor": {"w": torch.zeros(3), "updates": 0}})
        seen.add(found.step)
        if process.exitcode == 0:
            break
    else:
        pytest.fail("a save never ended")
    assert syscall > 5
    assert seen == {1, 2}


def test_a_checkpoint_of_another_format_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1).path
    (path / "state.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(DataError, match=r"state\.json: not of the format"):
        checkpoint.Checkpoint(path, 1).read()


def test_a_checkpoint_is_opened_by_its_path(tmp_path: Path) -> None:
    saved = write(tmp_path, 3)
    assert checkpoint.open_checkpoint(saved.path) == saved
    with pytest.raises(DataError, match=r"not a finished checkpoint: write .*step_00000003"):
        checkpoint.open_checkpoint(tmp_path)
    with pytest.raises(DataError, match="not a finished checkpoint"):
        checkpoint.open_checkpoint(tmp_path / "nowhere")


DATA, LIST = "rank_00000_0000.safetensors", "rank_00000.json"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut data": lambda folder: (folder / DATA).write_bytes((folder / DATA).read_bytes()[:90]),
    "zeroed data": lambda folder: (folder / DATA).write_bytes(bytes(4000)),
    "empty data": lambda folder: (folder / DATA).write_bytes(b""),
    "no data": lambda folder: (folder / DATA).unlink(),
    "cut list": lambda folder: (folder / LIST).write_bytes(b"{"),
    "another list": lambda folder: (folder / LIST).write_bytes(b"[]"),
    "no list": lambda folder: (folder / LIST).unlink(),
    "one list too many": lambda folder: shutil.copy(folder / LIST, folder / "rank_00001.json"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_tensors_are_not_taken_for_another_config(damage: Callable[[Path], object], tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 1, tensors={"actor": {"w": torch.ones(40)}}, facts={}, keep=1)
    damage(saved.path / "tensors")
    with pytest.raises(DataError, match=r"tensors.* can't be read .*; take an older checkpoint"):
        saved.load_tensors({"actor": {"w": torch.zeros(40)}})


@pytest.mark.parametrize(
    "wanted",
    [{"v": torch.zeros(40)}, {"w": torch.zeros(41)}, {"w": torch.zeros(40, dtype=torch.bfloat16)}],
    ids=["name", "shape", "dtype"],
)
def test_tensors_of_another_config_are_not_taken_for_damage(wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 1, tensors={"actor": {"w": torch.ones(40)}}, facts={}, keep=1)
    with pytest.raises(DataError, match="holds other weights than this config trains"):
        saved.load_tensors({"actor": wanted})


def test_random_state_is_restored(tmp_path: Path) -> None:
    saved = write(tmp_path, 1)

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(np.random.rand())

    first = draw()
    assert draw() != first
    saved.restore_random_state()
    assert draw() == first


def test_training_resumes_bit_equal(tmp_path: Path, make_batch: MakeAny, make_engine: MakeAny) -> None:
    optim = OptimConfig(lr=1e-2, schedule="cosine", warmup_steps=2)
    batch, objective = make_batch([4, 6, 3, 5]), SftObjective()

    def train(engine: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(float(engine.forward_backward(batch, objective).loss))
            engine.optim_step(objective.denominator(batch))
        return losses

    straight = train(make_engine(optim=optim), 6)
    engine = make_engine(optim=optim)
    first = train(engine, 3)
    checkpoint.save(tmp_path, 3, tensors={"actor": engine.state_dict()}, facts={}, keep=1)
    train(engine, 2)  # what comes after the checkpoint must not matter
    resumed = make_engine(optim=optim, seed=5)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = {"actor": resumed.state_dict()}
    found.load_tensors(state)
    resumed.load_state_dict(state["actor"])
    assert resumed.updates == 3
    assert first + train(resumed, 3) == straight
