"""What is no file is refused by its name wherever a path is read: reading a pipe would wait for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import ConfigError, DataError, Problem
from tandem.base.regular import irregular
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.models.loading import load_causal_lm
from tandem.plan.sft import SftPlan
from tandem.session.keep.exports import copy_model
from tests.plan.folders import MODEL_CONFIG, write_model

Problems = Callable[..., list[Problem]]

MODEL = "actor_rollout_ref.model"
EPISODE = "actor_rollout_ref.rollout.episode"


@pytest.mark.parametrize(
    ("file", "words", "key"),
    [
        ("p.jsonl", ["data.train_files=[p.jsonl]"], "data.train_files[0]"),
        ("p.parquet", ["data.val_files=[p.parquet]", "evaluation.interval=5"], "data.val_files[0]"),
        ("p.py", ["reward_manager.type=score", "reward_manager.file=p.py"], "reward_manager.file"),
        ("p.py", [f"{EPISODE}={{type: play, file: p.py}}"], f"{EPISODE}.file"),
        ("p.py", [f"{EPISODE}={{type: tool_calls, tools: p.py}}", "data.chat=true"], f"{EPISODE}.tools"),
    ],
)
def test_a_pipe_is_refused_by_its_name(
    place: Path, problems_of: Problems, file: str, words: list[str], key: str
) -> None:
    os.mkfifo(place / file)
    found = [problem for problem in problems_of(*words) if "a named pipe, and no file" in problem.reason]
    assert [problem.key for problem in found] == [key] and file in f"{found[0].value} {found[0].reason}"


def test_so_is_a_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.yaml")
    with pytest.raises(ConfigError, match="it is a named pipe, and no file") as error:
        load_words([str(tmp_path / "p.yaml")], Config)
    assert "p.yaml" in str(error.value)


ENTRIES = ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_so_is_one_in_a_folder_of_a_model(
    place: Path, problems_of: Problems, sft_plan_of: Callable[..., SftPlan], entry: str
) -> None:
    (place / "model" / entry).unlink(missing_ok=True)
    os.mkfifo(place / "model" / entry)
    reasons = {problem.reason for problem in problems_of() if problem.key == f"{MODEL}.path"}
    assert f"{entry} is a named pipe, and no file" in reasons
    assert f"{entry} is a named pipe, and no file" in {problem.reason for problem in sft_plan_of().problems}
    for load in (load_causal_lm, lambda folder: copy_model(folder, place / "out")):
        with pytest.raises(DataError, match="is a named pipe, and no file"):
            load(place / "model")


def test_so_is_one_in_a_folder_of_a_tokenizer(place: Path, problems_of: Problems) -> None:
    write_model(place / "other", **MODEL_CONFIG)
    (place / "other" / "tokenizer.json").unlink()
    os.mkfifo(place / "other" / "tokenizer.json")
    (problem,) = problems_of(f"{MODEL}.tokenizer_path=other")
    assert problem.key == f"{MODEL}.tokenizer_path" and "tokenizer.json is a named pipe" in problem.reason


def test_devices_and_what_the_kernel_makes_up_are_no_files(tmp_path: Path) -> None:
    assert irregular(Path("/dev/zero")) == "a device"
    assert irregular(Path("/proc/self/status")) == "made up by the kernel"
    (tmp_path / "link").symlink_to("/proc/kmsg")
    assert irregular(tmp_path / "link") == "made up by the kernel"
    assert irregular(tmp_path) is None and irregular(tmp_path / "none") is None


def test_a_device_for_data_is_refused(problems_of: Problems) -> None:
    (problem,) = problems_of("data.train_files=[/dev/zero]")
    assert problem.key == "data.train_files[0]" and "is a device, and no file" in problem.reason
