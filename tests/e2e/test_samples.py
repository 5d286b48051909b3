"""What a run keeps of its samples, against what it says of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tandem.observe.about import read_about, state_of
from tandem.observe.samples.parts import parts_in
from tests.e2e.seven import train, write_rows

STEPS = 3
MODES = {
    "colocate": (),
    "hybrid": ("execution.mode=hybrid", "execution.resource={actor: [1, 1], rollout: [1, 1]}", "runtime.threads=true"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_sample_of_every_step_is_kept_as_it_was_trained(task: Path, tmp_path: Path, mode: str) -> None:
    held_out = write_rows(tmp_path / "val.jsonl", [{"prompt": f"{d}>", "answer": str(d) * 4} for d in (3, 8)])
    run = train(
        task,
        *MODES[mode],
        f"trainer.output_dir={tmp_path / 'run'}",
        f"trainer.total_steps={STEPS}",
        "data.train_batch_size=4",
        "trainer.samples.tokens=true",
        f"data.val_files=[{held_out}]",
        "data.drop_val_prompts=false",
        "evaluation.interval=2",
        "evaluation.at_start=true",
    )
    parts = parts_in(tmp_path / "run")
    assert [part.step for part in parts if part.kind == "eval"] == [0, 2, 3]
    trained = [pq.read_table(part.path).to_pylist() for part in parts if part.kind == "train"]
    by_step = {row["step"]: row for row in run.rows}
    assert len(trained) == STEPS
    for step, rows in enumerate(trained, start=1):
        assert len(rows) == len({(row["group"], row["sample"]) for row in rows}) == 4 * 8
        rewards = [row["reward"] for row in rows if row["counted"]]
        assert sum(rewards) / len(rewards) == pytest.approx(by_step[step]["reward/mean"])
        assert sum(row["length"] for row in rows) / len(rows) == pytest.approx(by_step[step]["length/mean"])
        assert max(row["lag"] for row in rows if row["lag"] is not None) == by_step[step]["lag/max"]
        assert all("".join(row["tokens"]) == row["response"] for row in rows)
        assert all(len(row["logprobs"]) == len(row["token_ids"]) == row["length"] for row in rows)
        for group in range(4):
            own = [row for row in rows if row["group"] == group]
            best = max(own, key=lambda row: (row["reward"], row["length"]))
            assert (best["advantage"] > 0.1) == (len({row["reward"] for row in own}) > 1)
    evaluated = pq.read_table([part.path for part in parts if part.kind == "eval"][-1]).to_pylist()
    assert sum(row["reward"] for row in evaluated) / len(evaluated) == pytest.approx(by_step[STEPS]["eval/reward"])
    assert state_of(tmp_path / "run", read_about(tmp_path / "run")).kind == "finished"
