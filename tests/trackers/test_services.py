"""The trackers of services, each with its real package and without a network; ``make test-trackers`` installs them."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.observe.metrics import RolloutRecord
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tests.trackers.readers import Kept, read_mlflow, read_trackio, read_wandb

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("wandb", "mlflow", "trackio", "swanlab")
SECRET = "sk-verysecret12345"
CONFIG = {"trainer": {"seed": 3}, "reward_manager": {"api_key": SECRET, "url": f"https://me:{SECRET}@judge.org"}}
READERS: dict[str, Callable[[Path], Kept]] = {"mlflow": read_mlflow, "trackio": read_trackio, "wandb": read_wandb}


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No service reaches out, and each keeps what it keeps in this test's folder."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.chdir(kept)
    for name, value in environment(kept).items():
        monkeypatch.setenv(name, value)
    if "trackio" in sys.modules:  # it has read its folder when it was imported
        for module in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
            monkeypatch.delitem(sys.modules, module)


def environment(kept: Path) -> dict[str, str]:
    return {
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": str(kept / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{kept / 'mlflow.db'}",
    }


def needs(service: str) -> None:
    pytest.importorskip(service, reason=f"{service} is not installed here: make test-trackers")


def run(
    folder: Path,
    service: str,
    steps: range,
    *,
    resumed: int | None = None,
    error: Exception | None = None,
    pause_s: float = 0.0,
) -> None:
    info = RunInfo(folder, 10, resumed, CONFIG, goes_on=resumed is not None, project="sums", name="first")
    log = RunLog(info, [service])
    try:
        with log:
            for step in steps:
                time.sleep(pause_s)
                records = [RolloutRecord(f"p{step}", "é \x1b[31m<b>", 1.0, "g", 0)]
                records.append(RolloutRecord(f"p{step}", "r", None, {"a": 1}, 0))
                log.log(step, {"reward/mean": step / 10, "eval/pass@4": math.nan}, records, times=False)
                log.distributions(step, lambda: {"distribution/length": [1.0, 2.0, 2.0]})
            log.summarize(seconds=1.5, model="final")
            if error is not None:
                raise error
    except type(error or Exception) as caught:
        if caught is not error:
            raise


def without_secrets(folder: Path) -> bool:
    return not any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


STATES: dict[str, tuple[Any, Any]] = {
    "wandb": ([0], [0, 1]),
    "mlflow": (["FINISHED"], ["FAILED"]),
    "trackio": ([], ["the run failed"]),
}


@pytest.mark.parametrize("service", READERS)
def test_a_service_has_all_of_a_run_and_the_run_goes_on_as_the_same_one_there(service: str, tmp_path: Path) -> None:
    needs(service)
    folder, read = tmp_path / "run", READERS[service]
    where = folder if service == "wandb" else tmp_path / "kept"
    run(folder, service, range(1, 4))
    kept = read(where)
    assert kept.numbers["reward/mean"] == {1: 0.1, 2: 0.2, 3: 0.3}
    assert kept.histograms == {"distribution/length"}
    assert [row[:4] for row in kept.tables[:2]] == [[1, "p1", "é \x1b[31m<b>", 1.0], [1, "p1", "r", None]]
    assert len(kept.tables) == 6
    assert str(kept.config.get("trainer.seed") or kept.config["trainer"]["seed"]) == "3"
    assert {"state", "model", "seconds"} <= set(kept.summary)
    assert kept.states == STATES[service][0]

    # The run was killed after step 3; its checkpoint was of step 2, so that step 3 is made again.
    run(folder, service, range(3, 6), resumed=2, error=ValueError(f"api_key={SECRET} is refused"))
    kept = read(where)
    assert kept.numbers["reward/mean"] == {step: step / 10 for step in range(1, 6)}
    assert len(kept.tables) == 10 and len(kept.runs) == 1
    assert kept.states == STATES[service][1]
    assert without_secrets(tmp_path)


def test_swanlab_has_all_of_a_run(tmp_path: Path) -> None:
    needs("swanlab")
    run(tmp_path / "run", "swanlab", range(1, 3), error=ValueError(f"api_key={SECRET} is refused"))
    (file,) = tmp_path.rglob("*.swanlab")
    kept = file.read_bytes()
    for found in (b"reward/mean", b"distribution/length", b"samples", b"summary", b"***hidden*** is refused"):
        assert found in kept, found
    (config,) = tmp_path.rglob("files/config.yaml")
    assert "seed" in config.read_text()
    charts = "".join(path.read_text() for path in tmp_path.rglob("media/echarts/*.json"))
    assert "p2" in charts and "failed" in charts
    assert without_secrets(tmp_path)

    run(tmp_path / "run", "swanlab", range(2, 4), resumed=1)  # a folder more, of the same experiment
    known = json.loads((tmp_path / "run" / "trackers" / "swanlab.json").read_text())["id"]
    files = sorted(tmp_path.rglob("*.swanlab"))
    assert len(files) == 2 and all(
        file.stem == f"run-{known}" and known.encode() in file.read_bytes() for file in files
    )


SILENT = """
import logging, pathlib, sys, time
from tandem.observe.trackers import fence
from tests.trackers.test_services import run
fence.HANG_S = 3.0
fence.Beside.__init__.__kwdefaults__["hang_s"] = 3.0
logging.basicConfig(level=logging.WARNING, format="%(message)s")
began = time.monotonic()
run(pathlib.Path("run"), sys.argv[1], range(1, 40), pause_s=0.2)
print("took", time.monotonic() - began)
"""


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_server_that_takes_everything_and_answers_nothing_holds_nobody_up(service: str, tmp_path: Path) -> None:
    needs(service)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:  # connections wait there for ever
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
        asked = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "MLFLOW_TRACKING_URI": address}
        done = subprocess.run(
            [sys.executable, "-c", SILENT, service],
            cwd=tmp_path,
            env={**kept, **asked, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        silent.setblocking(False)
        silent.accept()[0].close()  # it was asked
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(f"logger '{service}'")]
    assert len(said) == 1 and "has not answered for 3 s: the run goes on without waiting" in said[0], done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 39
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    assert about["ended"]["outcome"] == "finished"


WITHOUT_A_KEY = """
import logging, pathlib, sys
from tests.trackers.test_services import run
logging.basicConfig(level=logging.WARNING, format="%(message)s")
run(pathlib.Path("run"), sys.argv[1], range(1, 3))
"""


@pytest.mark.parametrize("service", ["wandb", "swanlab"])
def test_without_a_key_a_service_fails_alone_and_asks_nobody(service: str, tmp_path: Path) -> None:
    needs(service)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "SWANLAB_"))}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_KEY, service],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith(f"logger '{service}'")]
    assert ["will be tried again" in said[0], "is given up" in said[1], len(said)] == [True, True, 2], done.stderr
    assert "key" in said[0]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2


def test_a_run_has_several_at_once_through_the_front_door(tmp_path: Path) -> None:
    for service in SERVICES:
        needs(service)
    words = [f"trainer.logger=[console,{','.join(SERVICES)}]", "trainer.total_steps=2", "trainer.project=sums"]
    words += [f"data.source.file={ROOT / 'examples/quickstart/sums.py'}"]
    words += [f"trainer.output_dir={tmp_path / 'run'}", "evaluation.interval=0", "evaluation.stop_at_accuracy=null"]
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "sft", str(ROOT / "examples/quickstart/sft.yaml"), *words],
        cwd=tmp_path,
        env={**os.environ, **environment(tmp_path / "kept"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "logger '" not in done.stderr
    for service, read in READERS.items():
        kept = read(tmp_path / "run" if service == "wandb" else tmp_path / "kept")
        assert set(kept.numbers["loss/sft"]) == {1, 2}, service
        assert any("run" in name for name in kept.runs)
