"""``tandem.train`` and ``tandem.sft``: runs of a program's own objects."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

import tandem
from tandem.base.errors import ConfigError, DataError, TandemError
from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.data.kept_rows import keep_rows
from tandem.reward.registry import REWARDS
from tests.cli import shouting
from tests.e2e.seven import make_task

ROWS = [{"prompt": f"{digit}>", "answer": str(digit) * 4} for digit in range(10)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The config of a tiny task, as nested mappings."""
    tree: dict[str, Any] = yaml.safe_load(make_task(tmp_path_factory.mktemp("seven")).read_text())
    tree["runtime"]["threads"] = False
    return tree


@pytest.fixture
def config(whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same without rows and reward, in a folder of its own."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # an interrupt changes what is printed of it
    data = {**whole["data"], "train_batch_size": 4}
    del data["train_files"]
    trainer = {"logger": [], "total_steps": 3, "output_dir": str(tmp_path / "run")}
    return {**whole, "data": data, "trainer": trainer, "reward_manager": {}}


def test_rows_and_a_reward_of_the_program_train_and_it_hears_of_each_step(config: dict[str, Any]) -> None:
    seen: list[str] = []
    heard: list[tuple[int, Mapping[str, object]]] = []

    def matches(response: str, ground_truth: str) -> float:
        seen.append(ground_truth)
        return sum(a == b for a, b in zip(response, ground_truth, strict=False)) / 4

    run = tandem.train(
        config, reward=matches, dataset=ROWS, callbacks=[lambda step, row: heard.append((step, row))], total_steps=2
    )
    assert [step for step, _ in heard] == [1, 2] and len(seen) >= 2 * 4 * 8
    assert [row["reward/mean"] for row in run.metrics] == [row["reward/mean"] for _, row in heard]
    assert (run.model / "config.json").is_file() and "matches" not in REWARDS
    kept = load_config(run.folder / "config.yaml", kind=Config)
    assert Path(kept.data.train_files[0]).read_text().count("\n") == 10


def test_after_an_interrupt_the_same_objects_go_on(config: dict[str, Any]) -> None:
    steps: list[int] = []

    def interrupted(step: int, row: Mapping[str, object]) -> None:
        steps.append(step)
        if steps == [1]:
            raise KeyboardInterrupt

    keys: dict[str, Any] = {"reward": lambda response: len(set(response)), "dataset": ROWS, "callbacks": [interrupted]}
    with pytest.raises(KeyboardInterrupt):
        tandem.train(config, **keys)
    run = tandem.train(config, "--resume latest", **keys)
    assert steps == [1, 2, 3] and len(run.metrics) == 3


def test_what_a_callback_raises_ends_the_run(config: dict[str, Any]) -> None:
    def fails(step: int, row: Mapping[str, object]) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        tandem.train(config, reward=lambda response: len(set(response)), dataset=ROWS, callbacks=[fails])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward": lambda response: 1.0, "reward_manager": {"type": "exact"}}, "names a reward, and one is given too"),
        ({"dataset": ROWS, "train_files": ["rows.jsonl"]}, "a dataset is given too"),
        ({"dataset": ROWS, "reward": 3}, "no function and no class"),
        ({"dataset": ROWS, "reward": lambda answer: 1.0}, "no sample has 'answer'"),
        ({"dataset": [{"prompt": object()}]}, "it can't be kept as JSON"),
        ({"dataset": 3}, "the train dataset returned a int"),
        ({"dataset": [{"question": "1"}]}, "prompt"),
        ({"dataset": ROWS, "totl_steps": 3}, "totl"),
        ({}, "data.train_files"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(
    config: dict[str, Any], changes: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tandem.control.entry", None)  # where everything is loaded
    with pytest.raises(TandemError) as caught:
        tandem.train(config, **changes)
    assert isinstance(caught.value, ConfigError | DataError) or "no sample has" in str(caught.value)
    assert told in str(caught.value)


def test_a_reward_that_others_can_import_is_named_by_its_file(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Config] = []
    entry = type(sys)("entry")
    entry.run_train = lambda config, plan, callbacks: ran.append(config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tandem.control.entry", entry)
    tandem.train(config, reward=shouting.share, dataset=ROWS)
    (loaded,) = ran
    assert (loaded.reward_manager.type, loaded.reward_manager.file) == ("share", shouting.__file__)


def test_sft_takes_rows(config: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "response": row["answer"]} for row in ROWS]
    document = {"model": {"path": config["actor_rollout_ref"]["model"]["path"]}, "trainer": config["trainer"]}
    heard: list[int] = []
    run = tandem.sft(
        document,
        dataset=rows,
        val_dataset=rows[:2],
        callbacks=[lambda step, row: heard.append(step)],
        data={"train_batch_size": 5, "max_length": 8},
    )
    assert heard[-3:] == [1, 2, 3] and (run.model / "config.json").is_file()


def test_equal_rows_are_one_file_and_a_dataset_is_parquet(tmp_path: Path) -> None:
    first = keep_rows(ROWS, tmp_path, "train")
    assert keep_rows([dict(row) for row in ROWS], tmp_path, "train") == first != keep_rows(ROWS[1:], tmp_path, "train")
    made = keep_rows(datasets.Dataset.from_list(ROWS), tmp_path, "val")
    assert made.suffix == ".parquet" and datasets.Dataset.from_parquet(str(made))[3]["answer"] == "3333"
