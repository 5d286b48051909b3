"""The commands: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem import __version__
from tandem.base.errors import DataError, TandemError
from tandem.cli.app import app
from tandem.cli.starter import STARTERS
from tandem.config.load import load_words
from tests.plan.folders import write_model
from tests.view.runs import make_run

ROOT = Path(__file__).parents[2]
runner = CliRunner()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the starter configs name; ``run.yaml`` and ``sft.yaml`` plan without a problem."""
    write_model(tmp_path / "model", max_position_embeddings=4096)
    row = json.dumps({"prompt": "1+1=", "answer": "2", "response": "2"})
    (tmp_path / "train.jsonl").write_text(f"{row}\n" * 100)
    (tmp_path / "run.yaml").write_text(STARTERS["train"].replace("Qwen/Qwen3-0.6B ", "./model "))
    (tmp_path / "sft.yaml").write_text(STARTERS["sft"].replace("Qwen/Qwen3-0.6B ", "./model "))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for what does the work: records how it is called and answers 0."""
    calls: list[tuple[Any, ...]] = []
    for home, names in {"entry": ("run_train", "run_sft"), "eval": ("run_eval",), "export": ("run_export",)}.items():
        module: Any = ModuleType(f"tandem.control.{home}")
        for name in names:
            setattr(module, name, lambda *words, name=name, **flags: calls.append((name, *words, *flags.items())) or 0)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def tandem(*words: str | Path) -> Any:
    return runner.invoke(app, [str(word) for word in words])


def test_version() -> None:
    assert tandem("--version").output.strip() == f"tandem {__version__}"


@pytest.mark.parametrize("template", ["train", "sft"])
def test_init_writes_a_config_that_is_valid(place: Path, template: str) -> None:
    written = tandem("init", template, "--out", "new/config.yaml")
    assert written.exit_code == 0
    load_words(["new/config.yaml"])
    assert tandem("init", template).stdout == (place / "new" / "config.yaml").read_text()
    again = tandem("init", template, "--out", "new/config.yaml")
    assert again.exit_code == 1
    assert "exists" in again.stderr


@pytest.mark.parametrize("name", ["train", "sft", "plan"])
def test_a_command_without_a_config_says_where_one_comes_from(place: Path, name: str) -> None:
    answer = tandem(name)
    assert answer.exit_code == 2 and "`tandem init quickstart`" in answer.stderr


def test_help_groups_the_flags_by_what_they_change() -> None:
    shown = " ".join(tandem("train", "-h").output.split())
    assert "actor_rollout_ref.rollout: --rollout name" in shown and "--lr optim.lr: Peak learning rate" in shown
    assert "--max-staleness" in shown and "--max-staleness" not in tandem("sft", "-h").output
    assert "--batch-size" in tandem("sft", "--help").output
    assert (
        tandem("plan", "--help").output.partition("execution:")[2]
        == tandem("train", "-h").output.partition("execution:")[2]
    )


def test_plan_prints_everything_of_a_run(place: Path) -> None:
    result = tandem("plan", "run.yaml", "--use-kl-loss", "actor_rollout_ref.rollout.n=4")
    assert result.exit_code == 0, result.output
    for word in ("rollout", "advantages", "ref_logprobs", "256", "4 per prompt", "optimizer steps", "no problem found"):
        assert word in result.stdout
    assert "\x1b" not in result.stdout


def test_plan_of_an_sft_run(place: Path) -> None:
    result = tandem("plan", "sft.yaml", "--lr", "1e-3")
    assert result.exit_code == 0, result.output
    assert "100" in result.stdout
    assert json.loads(tandem("plan", "sft.yaml", "--json").stdout)["kind"] == "sft"


def test_plan_for_machines(place: Path) -> None:
    content = json.loads(tandem("plan", "run.yaml", "--json", "--hybrid", "--max-staleness", "2").stdout)
    assert (content["mode"], content["devices"], content["problems"], content["later"]) == ("hybrid", 2, [], [])


def test_plan_with_problems_prints_all_of_them_and_exits_with_2(place: Path) -> None:
    words = ["actor_rollout_ref.rollout.temperature=0", "data.train_files=[absent.jsonl]"]
    result = tandem("plan", "run.yaml", *words)
    assert result.exit_code == 2
    assert "2 problems" in result.stdout
    assert "actor_rollout_ref.rollout.temperature = 0" in result.stdout
    assert "data.train_files[0] = 'absent.jsonl'" in result.stdout
    as_json = tandem("plan", "run.yaml", *words, "--json")
    assert as_json.exit_code == 2
    assert len(json.loads(as_json.stdout)["problems"]) == 2


def test_b90_problems_of_spelling_and_of_meaning_are_reported_together(place: Path) -> None:
    words = ["trainer.sed=1", "--hybrid", "execution.max_stalenes='2'", "data.train_files=[absent.jsonl]", "--lrr", "1"]
    words += ["algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n='1'"]
    result = tandem("plan", "run.yaml", *words, "--json")
    assert result.exit_code == 2
    keys = {problem["key"] for problem in json.loads(result.stdout)["problems"]}
    assert keys == {
        "trainer.sed",
        "execution.max_stalenes",
        "data.train_files[0]",
        "--lrr",
        "algorithm.adv_estimator",
        "actor_rollout_ref.rollout.n",
    }


def test_plan_of_a_file_that_is_no_yaml(place: Path) -> None:
    (place / "bad.yaml").write_text("a: [1\nb: 2\n")
    result = tandem("plan", "bad.yaml")
    assert result.exit_code == 2
    assert "bad.yaml, line 2" in result.stdout


def test_an_engine_that_can_not_run_yet_is_planned_and_refused_by_train(place: Path, entry: list[Any]) -> None:
    rollout = "actor_rollout_ref.rollout"
    wide = "execution.resource={actor: [1, 1], rollout: [1, 2]}"
    words = (f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=2", "execution.mode=hybrid", wide)
    planned = tandem("plan", "run.yaml", *words)
    assert planned.exit_code == 2
    assert "can't be run here" in planned.stdout and "no problem found" not in planned.stdout
    result = tandem("train", "run.yaml", *words)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if "rollout.tensor_model_parallel_size" in line]
    assert "not be run yet" in line
    assert entry == []


def test_notes_of_the_plan_are_told_by_the_run_that_starts(place: Path, entry: list[Any]) -> None:
    words = ["run.yaml", "--use-kl-loss", "--kl-loss-coef", "0"]
    notes = [line for line in tandem("plan", *words).stdout.splitlines() if line.startswith("note:")]
    assert any("kl.coef is 0" in note for note in notes)
    assert [line for line in tandem("train", *words).stdout.splitlines() if line.startswith("note:")] == notes


def test_train_hands_over_the_config_and_its_plan(place: Path, entry: list[Any]) -> None:
    result = tandem("train", "run.yaml", "trainer.seed=5", "--lr", "1e-3", "--actor_rollout_ref.rollout.top_k", "-1")
    assert result.exit_code == 0, result.output
    ((name, config, plan),) = entry
    assert (name, config.trainer.seed, plan.mode) == ("run_train", 5, "colocate")
    assert config.actor_rollout_ref.actor.optim.lr == 1e-3


def test_train_needs_no_file(place: Path, entry: list[Any]) -> None:
    assert (
        tandem("train", "--model", "./model", "--train-files", "train.jsonl", "--rollout-batch-size", "8").exit_code
        == 0
    )
    assert len(entry) == 1


def test_sft_eval_and_export_hand_over(place: Path, entry: list[Any]) -> None:
    (place / "runs" / "first" / "step-3").mkdir(parents=True)
    (place / "runs" / "first" / "config.yaml").write_text((place / "run.yaml").read_text())
    assert tandem("sft", "sft.yaml", "--seed", "3").exit_code == 0
    assert tandem("eval", "runs/first", "evaluation.n=4").exit_code == 0
    assert tandem("export", "runs/first/step-3", "out").exit_code == 0
    assert entry[0][0] == "run_sft"
    assert entry[0][1].trainer.seed == 3
    assert entry[1] == ("run_eval", Path("runs/first"), ["evaluation.n=4"], ("checkpoints", False))
    assert entry[2] == ("run_export", Path("runs/first/step-3"), Path("out"), None)


def test_a_document_of_the_other_command_is_refused(place: Path, entry: list[Any]) -> None:
    result = tandem("train", "sft.yaml")
    assert result.exit_code == 2
    assert "tandem sft" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (TandemError("told on purpose"), 1, "told on purpose"),
        (DataError("row 3 is null"), 2, "row 3 is null"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_on_purpose_have_no_traceback(
    place: Path, entry: list[Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(sys.modules["tandem.control.entry"], "run_train", fail)
    result = tandem("train", "run.yaml")
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.output


def test_the_exit_code_of_the_run_is_that_of_the_command(
    place: Path, entry: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["tandem.control.entry"], "run_train", lambda config, plan: 7)
    assert tandem("train", "run.yaml").exit_code == 7


def test_doctor_works_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    absent = {"torch", "ray", "tensorboard"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    result = tandem("doctor")
    assert result.exit_code == 0
    for word in ("python", "processors", "memory", "pydantic", "unknown without torch", "tandem-rl[tracking]"):
        assert word in result.stdout


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_doctor_sends_whoever_wants_an_engine_to_its_own_environment(engine: str) -> None:
    (line,) = [line for line in tandem("doctor").stdout.splitlines() if engine in line]
    assert f"make engine-{engine}" in line and "pip install" not in line


def test_models_fetch_names_what_there_is() -> None:
    result = tandem("models", "fetch", "smolm2-135m")
    assert result.exit_code == 1
    assert "'smollm2-135m'" in result.stderr


def command(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = "import sys; from tandem.cli import main; sys.argv[0] = 'tandem'; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=place, env=environment, capture_output=True, text=True
    )


def test_a_defect_keeps_its_traceback(place: Path, entry: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(sys.modules["tandem.control.entry"], "run_train", fail)
    result = tandem("train", "run.yaml")
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


def test_the_command_finds_plugins_in_the_folder_where_the_user_stands(place: Path) -> None:
    (place / "lab_of_mine.py").write_text("raise SystemError('broken on purpose')\n")
    result = command(place, "plan", "run.yaml", "plugins=[lab_of_mine]")
    assert result.returncode == 2
    assert "broken on purpose" in result.stdout
    (place / "lab_of_mine.py").write_text(
        "from tandem.reward.registry import register_reward\n\n\n"
        "@register_reward('mine')\ndef mine(response):\n    return 1.0\n"
    )
    result = command(place, "plan", "run.yaml", "plugins=[lab_of_mine]", "--reward", "mine")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["eval", "nowhere"], "there is no such run"),
        (["eval", "."], "holds no config.yaml"),
        (["export", "nowhere", "out"], "holds no model"),
        (["export", ".", "."], "exists: choose another name"),
    ],
)
def test_arguments_are_checked_before_anything_heavy_is_imported(words: list[str], told: str, tmp_path: Path) -> None:
    code = f"import sys; sys.argv = {['tandem', *words]!r}\nfrom tandem.cli.app import main\n"
    code += "try:\n    main()\nexcept SystemExit as end:\n    sys.exit(9 if 'torch' in sys.modules else end.code)\n"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, told in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("word", ["--port=0", "--open"])
def test_a_view_written_to_a_file_refuses_what_is_of_a_server(tmp_path: Path, word: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "about.json").write_text("{}")
    answer = tandem("view", tmp_path / "run", "--export", tmp_path / "view.html", word)
    assert answer.exit_code != 0 and "leave --port and --open away" in answer.output
    assert not (tmp_path / "view.html").exists()


def test_runs_are_listed_with_their_state_and_newest_numbers(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "first", steps=4)
    (tmp_path / "runs" / "second").mkdir()
    ended = {"at": "now", "outcome": "failed", "words": "DataError: \x1b[31mno row\x1b[0m\nin it"}
    (tmp_path / "runs" / "second" / "about.json").write_text(json.dumps({"starts": [], "ended": ended}))
    shown = tandem("runs", tmp_path / "runs").stdout.splitlines()
    assert [line.split()[:3] for line in shown[1:]] == [["first", "finished", "4"], ["second", "failed", "0"]]
    assert shown[2].endswith("DataError: [31mno row [0m in it") and "\x1b" not in shown[2]
    rows = json.loads(tandem("runs", tmp_path / "runs" / "first", "--json").stdout)
    assert [row["run"] for row in rows] == ["first"] and isinstance(rows[0]["reward"], float)
    nothing = tandem("runs", tmp_path / "nothing")
    assert nothing.exit_code == 2 and "no run is there" in nothing.stderr
