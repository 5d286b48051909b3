"""LoRA on Ray: two ranks train the adapters, two engines are sent them alone, and what is left is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tandem.control.entry import LOOPS
from tests.e2e.conftest import task
from tests.e2e.seven import Run, prepare

__all__ = ["task"]

WORDS = (
    "actor_rollout_ref.model.lora_rank=4",
    "trainer.total_steps=2",
    "trainer.exact=true",
    "trainer.export=adapter",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.kl={in: loss, coef: 0.05}",
)
ON_RAY = ("runtime.name=ray", "runtime.threads=false")
HYBRID = "execution={mode: hybrid, max_staleness: 0, resource: {actor: [1, 2], rollout: [1, 2]}}"


def finished(*words: str | Path) -> tuple[Run, dict[str, torch.Tensor]]:
    """A run, and its weights while its ranks lived."""
    session = prepare(*words)
    with session.run.running():
        LOOPS[session.plan.loop](session)
        weights = {name: tensor.clone() for name, tensor in session.composite.actor.export("adapter")}
    return Run(session, session.run.output_dir), weights


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_two_ranks_and_two_engines_train_the_adapters_that_one_process_does(task: Path, tmp_path: Path) -> None:
    here, expected = finished(task, *WORDS, f"trainer.output_dir={tmp_path / 'here'}")
    there, weights = finished(task, *WORDS, f"trainer.output_dir={tmp_path / 'there'}", HYBRID, *ON_RAY)
    assert (here.session.plan.pushed, there.session.plan.pushed) == ("nothing", "adapter")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4)
    assert there.rewards == here.rewards
    assert there.column("kl/mean") == pytest.approx(here.column("kl/mean"), abs=1e-6)
    base = AutoModelForCausalLM.from_pretrained(task.parent / "model")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "there" / "final")).state_dict()
    for name, tensor in weights.items():
        assert torch.equal(loaded[f"base_model.model.{name}"], tensor)
