"""What the side-by-side bench reads from runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import modes, staleness
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.plan import compile_plan


def written(folder: Path, mode: str, **times: float) -> Path:
    folder.mkdir(parents=True)
    words = ["actor_rollout_ref.model.path=model", "data.train_files=[train.jsonl]", *modes.MODES[mode]]
    document = load_words(words, Config).model_dump(mode="json", by_alias=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    times = {f"time/{key}": value for key, value in times.items()}
    rows = [{"step": k, "reward/mean": k / 20, "lag/mean": 0.5, **times} for k in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_is_read_as_its_parts_its_limit_and_its_rewards(tmp_path: Path) -> None:
    run = written(tmp_path / "run", "hybrid", rollout=2.1, train=1.5, publish=0.1, step=2.2, wait=0.5)
    row = modes.reading(run)
    assert row["limit"] == pytest.approx(2.1)
    assert row["fraction"] == pytest.approx(2.1 / 2.2)
    assert row["bound"] == "rollout-bound"
    assert row["perfect"] == pytest.approx(3.5 / 2)
    assert (row["first"], row["last"]) == (pytest.approx(0.275), pytest.approx(0.775))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Two seeds of three ways to train, hybrid on two runtimes."""
    steps = {("colocate", "local"): 4.0, ("colocate_1_thread", "local"): 3.0}
    steps |= {("hybrid", "local"): 2.4, ("hybrid", "ray"): 5.0}
    rows = []
    for (mode, runtime), step in steps.items():
        for seed in (0, 1):
            run = written(folder / f"{mode}_{runtime}" / str(seed), mode, rollout=1.0, train=1.0, step=step + seed)
            label = {"task": "quickstart", "mode": mode, "runtime": runtime, "seed": seed}
            rows.append({**label, **modes.reading(run), "last": 0.7 + 0.01 * seed + 0.02 * (runtime == "ray")})
    return rows


def test_hybrid_is_compared_with_the_faster_colocate_and_final_rewards_with_each_other(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    ratio, hybrid, turns, spread = modes.conclusions(rows)
    assert ratio == "hybrid / colocate_1_thread: 0.829 (2.9 s / 3.5 s a step)"
    assert "rollout-bound" in hybrid or "train-bound" in hybrid
    assert "turn-taking" in turns
    assert spread.startswith("final reward, means of 2 seeds: 0.705 (") and spread.endswith(
        "hybrid on ray), 0.020 apart"
    )
    assert len(modes.as_table(rows).splitlines()) == 2 + len(rows)


def test_what_was_measured_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def train(words: Sequence[str]) -> None:
        given = dict(word.split("=", 1) for word in words if "=" in word)
        ran.append(Path(given["trainer.output_dir"]).name)
        mode = given["execution.mode"]
        written(Path(given["trainer.output_dir"]), mode, rollout=1.0, train=1.0, step=2.0)
        if len(ran) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(modes, "train", train)
    words = [
        "--weights",
        "model",
        "--seeds",
        "0",
        "1",
        "--modes",
        "hybrid",
        "fully_async",
        "--runtimes",
        "local",
        "ray",
    ]
    monkeypatch.setattr(sys, "argv", ["modes", *words, "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        modes.main()
    shutil.rmtree(tmp_path / "quickstart_hybrid_ray_0")
    modes.main()
    assert len(ran) == 8 + 1 and len(set(ran)) == 8
    assert "final reward, means of 2 seeds" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["modes", *words, "--steps", "9", "--out", str(tmp_path)])
    for folder in tmp_path.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    modes.main()
    assert len(ran) == 9 + 8  # other words are another run


def test_staleness_is_compared_by_its_bound(tmp_path: Path) -> None:
    rows = [
        {"staleness": bound, "seed": seed, **modes.reading(written(tmp_path / f"{bound}_{seed}", "hybrid", **TIMES))}
        for bound in (0, 2)
        for seed in (0, 1)
    ]
    lines = staleness.as_table(rows).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["0", "2"]
    assert lines[2].split("|")[5].strip() == "2.200"


TIMES = {"rollout": 2.0, "train": 1.5, "publish": 0.1, "step": 2.2, "wait": 0.5}


@pytest.mark.parametrize("mode", modes.MODES)
@pytest.mark.parametrize("name", modes.TASKS)
def test_every_run_of_the_bench_lacks_but_its_model(mode: str, name: str) -> None:
    task = modes.TASKS[name]
    words = [str(modes.ROOT / task.config), "actor_rollout_ref.model.path=no/where", *task.words, *modes.MODES[mode]]
    config = load_words(words, Config)
    assert config.execution.mode == mode.removesuffix("_1_thread")
    assert [problem.key for problem in compile_plan(config).problems] == ["actor_rollout_ref.model.path"]
