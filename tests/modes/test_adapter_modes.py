"""LoRA in every mode: what reaches the engine are adapters, and the runs are the synchronous one bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.roles.train_rank import TrainRank
from tests.e2e.seven import Run, distance, equal, train

LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "algorithm.kl={in: loss, coef: 0.05}",
    "algorithm.old_logprobs=recompute",
    "trainer.total_steps=3",
    "data.train_batch_size=4",
)
MODES = {
    "hybrid": "{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 2}",
    "fully_async": "{mode: fully_async, max_staleness: 0}",
}
REFERENCES = {"base": (), "refreshed": ("actor_rollout_ref.ref.update_interval=2",)}


@pytest.fixture(scope="module", params=REFERENCES)
def reference(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """How the reference moves."""
    return REFERENCES[request.param]


@pytest.fixture(scope="module")
def colocated(task: Path, reference: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The synchronous run."""
    out = tmp_path_factory.mktemp("colocate")
    return train(task, f"trainer.output_dir={out}", *LORA, *reference, "trainer.exact=true")


@pytest.mark.parametrize("mode", MODES)
def test_adapters_alone_are_pushed_and_nothing_else_changes(
    task: Path, reference: tuple[str, ...], colocated: Run, tmp_path: Path, mode: str
) -> None:
    execution = f"execution={MODES[mode]}"
    run = train(task, f"trainer.output_dir={tmp_path}", *LORA, *reference, "trainer.exact=true", execution)
    assert equal(run.weights, colocated.weights)
    assert run.column("kl/mean") == colocated.column("kl/mean")
    assert run.column("kl/mean")[0] == 0 < run.column("kl/mean")[1]
    assert max(run.column("mismatch/abs")) < 1e-6
    adapters = sum(tensor.nbytes for _, tensor in run.session.composite.actor.export("adapter"))
    assert run.column("push/bytes") == [adapters] * 3
    assert run.session.plan.pushed == "adapter"


def test_merged_weights_are_pushed_where_that_is_asked_for(task: Path, tmp_path: Path) -> None:
    words = (task, *LORA, f"trainer.output_dir={tmp_path / 'hybrid'}")
    execution = "execution={mode: hybrid, max_staleness: 0, weight_sync: {lora: merged}}"
    run, adapted = train(*words, execution), train(*words, f"trainer.output_dir={tmp_path / 'colocate'}")
    assert run.column("push/bytes") == [sum(tensor.nbytes for tensor in run.weights.values())] * 3
    assert distance(run.weights, adapted.weights) < 1e-2  # a draw may flip
    assert run.rewards[0] == pytest.approx(adapted.rewards[0])


def test_the_old_policy_of_stepped_slices_is_a_copy_of_the_adapters(task: Path, tmp_path: Path) -> None:
    execution = "{mode: hybrid, num_iters_per_train_update: 4, train_pipelining: step, weight_sync: {overlap: true}}"
    words = (*LORA, "data.train_batch_size=16")  # of fewer, all of a slice may have one reward and teach nothing
    run = train(task, f"trainer.output_dir={tmp_path}", f"execution={execution}", *words)
    assert [row["updates"] for row in run.rows] == [4, 8, 12]
    copies = run.session.composite.actor.ranks.call(TrainRank.status).tags
    assert copies == ("actor", "old_actor", "ref")
    assert all(torch.isfinite(torch.tensor(run.column("loss/policy"))))
