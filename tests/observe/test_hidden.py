"""Secrets are in the memory of who needs them: never printed, logged, or written by a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tandem.base.errors import ConfigError, Problem, RewardError, TandemError, sentences
from tandem.base.hidden import HIDDEN, hide, hide_in, hide_words
from tandem.cli.app import app
from tandem.cli.reporting import _interrupted
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
        *(
            f"https://host/x?a=1&{name}={SECRET}"
            for name in (
                "private_token",
                "subscription-key",
                "X-Amz-Signature",
                "X-Amz-Security-Token",
                "X-Amz-Credential",
                "tok",
                "clientSecret",
                "api%5Fkey",
                "oauth_token_secret",
                "userpassword",
                "apikey",
                "x.auth",
                "accessToken",
            )
        ),
        f"https://host/#access_token={SECRET}",
        f"sk-user:{SECRET}@judge.example/v1",
        f"base_url=me:{SECRET}@host: refused",
        f"https://me:pass/{SECRET}@host/v1",
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
        "https://host:8000/@user/model?max_tokens=5&keyword=a&monkey=b&author=c&tokens=4",
        "mailto:me@example.org",
        "pip install scikit-learn sk-learn hf_transfer; task-00000001, disk-A1234567, hf_generation, models/hf_model",
        "error at 12:30, file.py:3: @decorator",
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


def test_a_folder_that_looks_like_a_key_stays_where_it_is_read_from() -> None:
    """What a run wrote of its config reads what the run read; an address in such a place loses its password."""
    document = {
        "model": {"path": "/models/sk-Name123456", "tokenizer_path": "hf_aBcDeFgH1234"}, "resume": "runs/sk-Name123456",
        "data": {"train_files": ["sk-Name123456/a.jsonl"]}, "by_source": {"token": "/models/sk-Name123456"},
        "output_dir": "runs/me:x@y/out",
    }  # fmt: skip
    assert hide_in(document) == document
    assert SECRET not in hide_in({"path": f"https://me:{SECRET}@host/model"})["path"]
    assert HIDDEN in hide_in({"model": "sk-Name123456"})["model"]


@pytest.mark.parametrize(
    "key",
    [
        "sk-SECRET123", "sk-proj-abcdefghijklmnop", "sk-0123456789abcdef0123456789abcdef", "hf_aBcDeFgH1234",
        "ghp_0123456789abcdefABCDEF", "github_pat_11AAAA_bbbbbbbb", "glpat-abcdefgh1234", "AKIAIOSFODNN7EXAMPLE",
    ],
)  # fmt: skip
def test_what_looks_like_a_key_is_replaced_wherever_it_stands(key: str) -> None:
    for text in (key, f"refused: {key}.", f"https://host/{key}/x", f"?q={key}"):
        assert key not in hide(text) and hide(hide(text)) == hide(text)


@pytest.mark.parametrize(
    "words",
    [
        [f"reward_manager.api_key={SECRET}"],
        ["--reward_manager.api_key", SECRET],
        ["--reward_manager.api-key", f"{SECRET}=="],
        [f"--reward_manager.password={SECRET}"],
        [f"reward_manager.url=http://me:{SECRET}@host"],
        ["--reward_manager.url", f"http://host/v1?tok={SECRET}"],
        ["--hybrid", f"reward_manager.api_key={SECRET}"],
        [f"reward_manager={{type: Remote, api_key: {SECRET}}}"],
        ["--reward_manager", f"{{headers: {{Authorization: {SECRET}}}}}"],
        ["--reward_manager.api_key_env", f"{SECRET}"],
    ],
)
def test_the_command_that_goes_on_shows_none(words: list[str]) -> None:
    assert SECRET not in " ".join(hide_words([*words, "trainer.seed=1"]))
    assert SECRET not in _interrupted(2, "train", words)


def test_the_other_words_of_a_command_stay_as_they_are() -> None:
    words = ["run.yaml", "trainer.seed=1", "--hybrid", "--lr", "1e-6", "data={a: [1, 2]}", "--api_key_env", "JUDGE_KEY"]
    assert hide_words(words) == words and hide_words(["--api_key", "run.yaml"]) == ["--api_key", "run.yaml"]


@pytest.mark.parametrize(
    "value", ["s3cr3t-Value", "sk-SECRET123456", "hf_aBcDeFgH1234", "0123456789abcdef", "a" * 31 + "1"]
)
def test_a_key_in_place_of_its_variable_s_name_is_refused_without_showing_it(
    plan_of: Callable[..., Plan], value: str
) -> None:
    plan = plan_of(f"reward_manager={{type: judge, model: m, base_url: 'http://localhost/v1', api_key_env: '{value}'}}")
    (problem,) = plan.problems
    assert problem.key == "reward_manager.api_key_env" and "api_key_env: API_KEY" in problem.remedy
    assert value not in str(problem) and value not in plan.to_json()
    with pytest.raises(RewardError) as raised:
        Judge(base_url="http://localhost/v1", model="m", api_key_env=value)
    assert value not in str(raised.value)
    assert value not in json.dumps(hide_in({"api_key_env": value}))


def test_an_address_that_lacks_its_scheme_is_refused_without_its_password(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(f"reward_manager={{type: judge, model: m, base_url: 'sk-user:{SECRET}@judge.example/v1'}}")
    (problem,) = plan.problems
    assert "it is no address" in str(problem) and SECRET not in str(problem) and SECRET not in plan.to_json()


def test_sentences_end_once() -> None:
    assert str(Problem("a", 1, "did you mean 'b'?", "Correct it")) == "a = 1: did you mean 'b'? Correct it"
    assert sentences("See the log for more information.", "Its tickets go on") == (
        "See the log for more information. Its tickets go on"
    )
    assert sentences("it ended", "Wait…", "go on") == "it ended. Wait… go on"


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


@pytest.mark.parametrize("text", ["a", "abc-", "a://b:", "?a"])
def test_long_texts_without_a_gap_pass_as_they_are(text: str) -> None:
    """Within the limit of a test: read to the end from each of its letters, it would take an hour."""
    assert hide(text * 50_000) == text * 50_000
