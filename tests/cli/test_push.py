"""``tandem push``: what arrives at a hub that is a small server here, and what is said where nothing arrives."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.observe.card import card_of
from tests.view.runs import make_run

SECRET = "sk-thisisasecretkey0123456789abcdef"


class Hub:
    """A hub for one user: it makes repositories, takes a commit, and says 401 to whoever sends no token."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, object]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if self.headers.get("Authorization") != "Bearer hf_right":
                    self._say(401, {"error": "Invalid username or password."})
                elif self.path == "/api/validate-yaml":
                    self._say(200, {"errors": [], "warnings": []})
                elif self.path == "/api/repos/create":
                    hub.made.append(json.loads(body))
                    self._say(200, {"url": f"{hub.url}/me/model", "name": "me/model", "id": "me/model"})
                elif self.path == "/api/models/me/model/preupload/main":
                    files = json.loads(body)["files"]
                    answer = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
                    self._say(200, {"files": answer})
                elif self.path.startswith("/api/models/me/model/commit/main"):
                    for line in body.decode().splitlines():
                        entry = json.loads(line)
                        if entry["key"] == "file":
                            hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                    commit = {"commitUrl": f"{hub.url}/me/model/commit/{'a' * 40}", "commitOid": "a" * 40}
                    self._say(200, commit)
                else:
                    self._say(404, {"error": f"no {self.path} here"})

            def _say(self, status: int, content: object) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that listens."""
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run: its model is a few files, as a hub sees it."""
    folder = make_run(tmp_path / "run", steps=3)
    config = {
        "actor_rollout_ref": {
            "model": {"path": "Qwen/Qwen3-0.6B", "lora_rank": 0, "dtype": "bfloat16"},
            "actor": {"optim": {"lr": 1e-6}},
            "rollout": {"n": 8},
        },
        "algorithm": {"adv_estimator": "grpo", "policy_loss": {"type": "ppo_clip"}, "kl": {"in": "off"}},
        "reward_manager": {"type": "judge", "api_key": SECRET},
        "data": {"train_files": ["/home/somebody/private/sums.jsonl"], "train_batch_size": 64},
        "trainer": {"seed": 7},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "final").mkdir(exist_ok=True)
    (folder / "final" / "config.json").write_text("{}")
    (folder / "final" / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return folder


def push(run: Path, endpoint: str, token: str = "hf_right", *words: str) -> subprocess.CompletedProcess[str]:
    """``tandem push`` as a user calls it, at another hub."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "tandem", "push", str(run), "me/model", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_model_card_config_and_metrics_arrive_and_no_secret_does(run: Path, hub: Hub) -> None:
    done = push(run, hub.url, "hf_right", "--private")
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/me/model" in done.stdout
    assert hub.made[0]["name"] == "model" and hub.made[0]["organization"] == "me"
    assert hub.made[0].get("private") is True or hub.made[0].get("visibility") == "private"
    names = {"README.md", "config.json", "model.safetensors", "training/config.yaml", "training/metrics.jsonl"}
    assert names <= set(hub.files)
    assert hub.files["model.safetensors"] == (run / "final" / "model.safetensors").read_bytes()
    assert SECRET.encode() not in b"".join(hub.files.values())
    header = yaml.safe_load(hub.files["README.md"].decode().split("---")[1])
    assert header["base_model"] == "Qwen/Qwen3-0.6B" and header["library_name"] == "transformers"
    assert len(hub.files["training/metrics.jsonl"].splitlines()) == 3


def test_who_may_not_and_a_hub_that_is_not_there_are_told_in_one_line(run: Path, hub: Hub) -> None:
    for endpoint, token, said in (
        (hub.url, "hf_wrong", "set HF_TOKEN to a token that may write"),
        ("http://127.0.0.1:9", "hf_right", "http://127.0.0.1:9 can't be reached"),
    ):
        done = push(run, endpoint, token)
        assert done.returncode == 1 and said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_dry_run_writes_the_folder_and_asks_nobody(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "looked"
    done = push(run, "http://127.0.0.1:9", "hf_right", "--dry-run", str(out))
    assert done.returncode == 0, done.stderr
    assert (out / "README.md").read_text() == card_of(run, "me/model")
    assert SECRET not in (out / "training" / "config.yaml").read_text()


def test_the_card_says_how_it_was_trained(run: Path) -> None:
    card = card_of(run, "me/model")
    for line in ("| advantage estimator | grpo |", "| answers per prompt | 8 |", "| learning rate | 1e-06 |"):
        assert line in card
    assert "| training data | sums.jsonl |" in card and "/home/somebody" not in card
    assert "KL" not in card and "| reward | " in card


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere", "me/model"), "holds no final"),
        (("run", "me/model/x"), "no name of a repository"),
        (("run", "me/model", "--dry-run", "run"), "run exists"),
    ],
)
def test_what_can_not_be_pushed_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(run.parent)
    done = CliRunner().invoke(app, ["push", *words])
    assert done.exit_code == 2 and said in done.output


def test_a_run_without_a_config_that_can_be_read_is_refused(run: Path) -> None:
    for content in ("a: [", "just words"):
        (run / "config.yaml").write_text(content)
        done = CliRunner().invoke(app, ["push", str(run), "me/model", "--dry-run", str(run.parent / "x")])
        assert done.exit_code == 2 and "config.yaml" in done.output and not (run.parent / "x").exists()
