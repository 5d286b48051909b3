"""A hybrid run with Megatron-core on two devices is the run on one with fully_shard, and its model is exported."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import load_tokenizer
from tests.e2e.conftest import task
from tests.e2e.seven import distance
from tests.ray.test_ray_modes import FIVE, RAY, watch

__all__ = ["task"]

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

MEGATRON = "actor_rollout_ref.actor.strategy=megatron"
SPLIT = (
    MEGATRON,
    "actor_rollout_ref.actor.tensor_model_parallel_size=2",
    "execution={mode: hybrid, max_staleness: 0, resource: {actor: [1, 2], rollout: [1, 1]}}",
)


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_run_of_megatron_on_two_devices_is_that_of_one_and_is_exported(task: Path, tmp_path: Path) -> None:
    """A row more than there are tokens makes its vocabulary even. The reference is a tag."""
    shape = json.loads((task.parent / "model" / "config.json").read_text())
    model = new_model({**shape, "vocab_size": shape["vocab_size"] + 1}, seed=0)
    save_pretrained_atomic(model, load_tokenizer(str(task.parent / "model")), tmp_path / "model")
    steps = (*FIVE, "trainer.total_steps=3")
    words = (task, f"actor_rollout_ref.model.path={tmp_path / 'model'}", *steps)
    alone = watch(*words, f"trainer.output_dir={tmp_path / 'alone'}")
    saves = ("trainer.save_interval=2", "trainer.keep_checkpoints=9")
    found = watch(*words, *SPLIT, *RAY, *saves, f"trainer.output_dir={tmp_path / 'run'}")
    assert found.samples() == alone.samples()
    assert 0 < distance(found.weights, alone.weights) < 5e-5  # after three steps
    saved = tmp_path / "run" / "checkpoints" / "step_00000002"
    plain = AutoModelForCausalLM.from_pretrained(saved / "model").state_dict()
    assert plain.keys() == found.weights.keys()
    assert 0 < distance(plain, found.weights) < 0.1  # as it was a step earlier
