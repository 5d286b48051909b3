"""What the side-by-side bench reads from runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bench import modes
from tandem.config.load import load_words
from tandem.config.schema import Config


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
    run = written(tmp_path / "run", "hybrid", rollout=2.0, train=1.5, publish=0.1, step=2.2, wait=0.5)
    row = modes.reading(run)
    assert row["limit"] == pytest.approx(2.1)
    assert row["fraction"] == pytest.approx(2.1 / 2.2)
    assert row["bound"] == "rollout-bound"
    assert row["perfect"] == pytest.approx(3.5 / 2)
    assert (row["first"], row["last"]) == (pytest.approx(0.275), pytest.approx(0.775))


def test_hybrid_is_compared_with_the_faster_colocate(tmp_path: Path) -> None:
    steps = {"colocate": 4.0, "colocate_1_thread": 3.0, "hybrid": 2.4}
    rows = []
    for mode, step in steps.items():
        for seed in (0, 1):
            run = written(tmp_path / mode / str(seed), mode, rollout=1.0, train=1.0, step=step + seed)
            rows.append({"mode": mode, "seed": seed, **modes.reading(run)})
    summary = modes.summary(rows)
    assert summary["hybrid_over_colocate"] == pytest.approx(2.9 / 3.5)
    assert set(summary["means"]) == set(steps)
    assert len(modes.as_table(rows).splitlines()) == 2 + len(rows)


@pytest.mark.parametrize("mode", modes.MODES)
def test_every_mode_of_the_bench_is_a_config(mode: str) -> None:
    words = ["actor_rollout_ref.model.path=model", "data.train_files=[train.jsonl]", *modes.MODES[mode]]
    assert load_words(words, Config).execution.mode == mode.removesuffix("_1_thread")
