"""Secrets are in the memory of who needs them: never printed, logged, or written by a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tandem.base.errors import ConfigError, Problem, RewardError, TandemError
from tandem.base.hidden import HIDDEN, hide, hide_in, hide_word
from tandem.cli.app import _interrupted, app
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.observe.trackers import TRACKERS, RunInfo
from tandem.plan.plan import Plan, compile_plan
from tandem.reward.scorers.judge import Judge
from tests.e2e.conftest import task
from tests.plan.conftest import place, plan_of

__all__ = ["place", "plan_of", "task"]

SECRET = "s3cr3t-Value"


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@host:8000/v1",
        f"HTTPS://{SECRET}@host",
        f"can't reach postgresql+psycopg://me:p@{SECRET}@db/x: refused",
        f"http://host/v1?model=m&api_key={SECRET}",
        f"http://host/v1?token={SECRET}#there",
        f"https://host/x?sig={SECRET}&b=1",
        f"{{'Authorization': 'Bearer {SECRET}'}}",
        f"Authorization: Basic {SECRET}",
        f"status 401 for bearer {SECRET}",
        f"x-api-key: {SECRET}",
    ],
)
def test_secrets_of_addresses_and_headers_are_replaced_wherever_they_stand(text: str) -> None:
    assert SECRET not in hide(text) and HIDDEN in hide(text)
    assert hide(hide(text)) == hide(text)
    assert SECRET not in str(TandemError(text)) and SECRET not in str(Problem("a.b", text, text, text))


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:8000/v1",
        "mail me@example.org",
        "https://host/@user/model?page=2",
        "a basic understanding of the bearer",
        "data.template = 'x = *** {question}'",
        "trainer.seed = 1: the saved run has 0",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert hide(text) == text


def test_what_a_key_calls_secret_is_replaced_whole_and_names_of_variables_are_not() -> None:
    document = {
        "api_key": SECRET, "headers": {"Authorization": SECRET, "X-Api-Key": SECRET}, "list": [{"password": SECRET}],
        "api_key_env": "JUDGE_KEY", "stop_token_ids": [1], "pad_token": "<pad>", "keyword": "yes", "token": None,
    }  # fmt: skip
    shown = hide_in(document)
    assert SECRET not in json.dumps(shown)
    kept = ("api_key_env", "stop_token_ids", "pad_token", "keyword", "token")
    assert {key: shown[key] for key in kept} == {key: document[key] for key in kept}


def test_the_command_that_goes_on_shows_none() -> None:
    words = [f"reward_manager.api_key={SECRET}", f"reward_manager.url=http://me:{SECRET}@host", "trainer.seed=1"]
    assert SECRET not in " ".join(map(hide_word, words)) and hide_word(words[2]) == words[2]
    assert SECRET not in _interrupted(2, "train", words)


def test_a_judge_s_address_with_a_password_is_refused_without_showing_it(plan_of: Callable[..., Plan]) -> None:
    address = f"http://me:{SECRET}@localhost:8000/v1"
    plan = plan_of(f"reward_manager={{type: judge, model: m, base_url: '{address}'}}")
    (problem,) = plan.problems
    assert problem.key == "reward_manager.base_url" and "api_key_env" in problem.remedy
    assert SECRET not in str(problem) and SECRET not in str(ConfigError([problem])) and SECRET not in plan.to_json()
    with pytest.raises(RewardError) as raised:
        Judge(base_url=address, model="m")
    assert SECRET not in str(raised.value)


SCORER = """
class Remote:
    def __init__(self, *, url, api_key, headers):
        self.url, self.headers = url, headers

    def __call__(self, response, ground_truth):
        if len(response) % 2:
            raise RuntimeError(f"{self.url} refuses {self.headers}")
        return float(response[:1] == ground_truth[:1])
"""


def test_a_run_writes_and_prints_none(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote.py").write_text(SCORER)
    told: list[RunInfo] = []

    class Service:
        """A tracker that is given the config, and whose address has a password."""

        def __init__(self, info: RunInfo) -> None:
            told.append(info)

        def log(self, step: int, metrics: object) -> None:
            raise ConnectionError(f"https://me:{SECRET}@tracker.example refuses")

        def finish(self) -> None:
            """Nothing is open."""

    if "service" not in TRACKERS:
        TRACKERS.register("service")(Service)
    config = yaml.safe_load(task.read_text())
    config["reward_manager"] = {
        "type": "Remote", "file": str(tmp_path / "remote.py"), "url": f"http://me:{SECRET}@host/v1",
        "api_key": SECRET, "headers": {"Authorization": f"Bearer {SECRET}"},
    }  # fmt: skip
    config["trainer"] |= {
        "total_steps": 1, "save_interval": 1, "logger": ["console", "service"], "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    assert "refuses" in result.output, "the scorer's words are told"
    assert SECRET not in result.output
    shown = logging.getLogger().handlers[0].formatter or logging.Formatter()
    assert any(SECRET in record.getMessage() for record in caplog.records) is False or all(
        SECRET not in shown.format(record) for record in caplog.records
    )
    assert SECRET not in json.dumps(told[0].config, default=str)
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"config.yaml", "report.html", "metrics.jsonl", "state.json"}
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_a_config_whose_secrets_were_left_out_asks_for_them(task: Path, tmp_path: Path) -> None:
    (tmp_path / "remote.py").write_text(SCORER)
    tree = yaml.safe_load(task.read_text())
    tree["reward_manager"] = {
        "type": "Remote", "file": str(tmp_path / "remote.py"), "url": "u", "api_key": HIDDEN, "headers": {},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    words = [str(tmp_path / "run.yaml")]
    (problem,) = compile_plan(load_words(words, Config)).problems
    assert problem.key == "reward_manager.api_key" and "reward_manager.api_key=..." in problem.remedy
    assert compile_plan(load_words([*words, "reward_manager.api_key=new"], Config)).problems == ()
