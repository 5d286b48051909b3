"""What somebody has who installed Tandem and has no repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

import tandem
from tandem.cli.app import app
from tandem.cli.examples import example_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel, as an installer lays them down."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site-packages")
    return folder / "site-packages"


@pytest.fixture
def empty(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the installed package is the one that is used."""
    monkeypatch.setattr(tandem, "__file__", str(installed / "tandem" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> Any:
    return CliRunner().invoke(app, words)


def test_every_example_and_every_licence_is_in_the_wheel(installed: Path) -> None:
    shipped = {path.relative_to(installed / "tandem/examples") for path in (installed / "tandem/examples").rglob("*")}
    kept = {path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*")}
    assert shipped == {path for path in kept if "__pycache__" not in path.parts}
    assert sorted(path.name for path in (installed / "tandem/docs").iterdir()) == ["not-learning.md", "rewards.md"]
    assert sorted(path.suffix for path in installed.iterdir()) == ["", ".dist-info"]
    assert list(installed.glob("*.dist-info/licenses/tandem/view/page/uplot/LICENSE"))


def test_an_example_comes_with_all_that_it_names_and_is_planned_where_it_was_put(empty: Path) -> None:
    answer = command("init", "ppo")
    assert answer.exit_code == 0 and "Next: tandem sft examples/quickstart/sft.yaml" in answer.output
    for file in ("ppo/ppo.yaml", "quickstart/sums.py"):
        assert (empty / "examples" / file).read_bytes() == (ROOT / "examples" / file).read_bytes()
    assert command("plan", "examples/quickstart/sft.yaml").exit_code == 0


def test_each_example_begins_with_a_command(empty: Path) -> None:
    for name in example_names():
        answer = command("init", name, "--out", "here")
        assert answer.exit_code == 0 and "Next: cd here, then " in answer.output
        assert answer.output.rpartition(", then ")[2].split()[0] in ("tandem", "python", "pip", "bash"), name


def test_a_copy_that_was_changed_is_not_written_over(empty: Path) -> None:
    assert command("init", "quickstart").exit_code == 0
    assert command("init", "ppo").exit_code == 0  # what is there and the same stays
    (empty / "examples/quickstart/sums.py").write_text("mine")
    answer = command("init", "dpo")
    assert answer.exit_code == 1 and "sums.py exists and differs from the example's" in answer.output
    assert (empty / "examples/quickstart/sums.py").read_text() == "mine" and not (empty / "examples/dpo").exists()


def test_a_name_that_no_example_has_is_refused_with_those_that_there_are(empty: Path) -> None:
    answer = command("init", "quikstart")
    assert answer.exit_code == 1 and "Did you mean 'quickstart'?" in answer.output and "smollm2" in answer.output
    assert not list(empty.iterdir())


@pytest.mark.skipif("TANDEM_WHEEL" not in os.environ, reason="half a minute: make test-wheel")
def test_the_quickstart_of_the_package_trains(installed: Path, tmp_path: Path) -> None:
    def run(*words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        subprocess.run([sys.executable, "-m", "tandem", *words], cwd=tmp_path, env=environment, check=True)

    run("init", "quickstart")
    run("sft", "examples/quickstart/sft.yaml", "--total-steps", "2")
    few = ("--total-steps", "1", "--rollout-batch-size", "4", "evaluation.at_start=false", "evaluation.interval=0")
    run("train", "examples/quickstart/grpo.yaml", "reward_manager={type: keyword, keyword: '1'}", *few)
    assert (tmp_path / "runs/quickstart/grpo/final/config.json").is_file()
