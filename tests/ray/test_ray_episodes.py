"""Episodes on Ray: an engine there answers turn by turn, and the run is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.seven import distance, train
from tests.episodes.conftest import TALK, task

__all__ = ["task"]


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_an_engine_on_ray_plays_the_episodes_of_one_process(task: Path, tmp_path: Path) -> None:
    words = (
        task,
        *TALK,
        "trainer.total_steps=2",
        "data.train_batch_size=2",
        "data.max_response_length=24",
        "trainer.exact=true",
    )
    here = train(*words, f"trainer.output_dir={tmp_path / 'here'}")
    execution = "execution={mode: hybrid, max_staleness: 0, resource: {actor: [1, 1], rollout: [1, 1]}}"
    there = train(
        *words, f"trainer.output_dir={tmp_path / 'there'}", execution, "runtime={name: ray, torch_threads: 1}"
    )
    assert there.rewards == here.rewards
    assert there.column("episode/turns") == here.column("episode/turns")
    final = [load_file(run.output / "final" / "model.safetensors") for run in (here, there)]
    assert distance(*final) < 1e-4
