"""A checkpoint is whole or not seen, and training goes on from it as if never stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.base.errors import DataError
from tandem.config.model import OptimConfig
from tandem.train import checkpoint
from tandem.train.objective import SftObjective

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


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    checkpoint.save(tmp_path, 1, tensors={"w": torch.ones(1)}, facts={"new": True}, keep=2)
    assert (found := checkpoint.latest(tmp_path)) is not None
    assert found.read() == {"new": True}


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_b72_half_written_folders_are_skipped(tmp_path: Path) -> None:
    """Every way in which the newest folder may be incomplete falls back to the previous one."""
    write(tmp_path, 1)
    whole = write(tmp_path, 2).path
    breaks: list[Callable[[Path], None]] = [
        lambda path: (path / "state.json").unlink(),
        lambda path: (path / "state.json").write_text((path / "state.json").read_text()[:50]),
        lambda path: (path / "state.json").write_text(""),
        lambda path: [shutil.rmtree(path), path.mkdir()][0],
    ]
    for damage in breaks:
        broken = tmp_path / "step_00000003"
        shutil.copytree(whole, broken)
        damage(broken)
        assert (found := checkpoint.latest(tmp_path)) is not None
        assert found.step == 2
        shutil.rmtree(broken)


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


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut data": lambda folder: (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:900]),
    "zeroed data": lambda folder: (folder / "__0_0.distcp").write_bytes(bytes(4000)),
    "empty data": lambda folder: (folder / "__0_0.distcp").write_bytes(b""),
    "no data": lambda folder: (folder / "__0_0.distcp").unlink(),
    "cut list": lambda folder: (folder / ".metadata").write_bytes(b"\x80"),
    "no list": lambda folder: (folder / ".metadata").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_tensors_are_not_taken_for_another_config(damage: Callable[[Path], object], tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 1, tensors={"actor": {"w": torch.ones(40)}}, facts={}, keep=1)
    damage(saved.path / "tensors")
    with pytest.raises(DataError, match=r"tensors can't be read .*; take an older checkpoint"):
        saved.load_tensors({"actor": {"w": torch.zeros(40)}})


@pytest.mark.parametrize("wanted", [{"v": torch.zeros(40)}, {"w": torch.zeros(41)}], ids=["name", "shape"])
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
