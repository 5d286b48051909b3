"""Teachers on Ray, tags of the actor's ranks or with ranks of their own: the same lesson as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tests.e2e.conftest import task
from tests.e2e.seven import ALPHABET, SHAPE, train

__all__ = ["task"]

SMALL = (
    "trainer.total_steps=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.old_logprobs=recompute",
    "algorithm.distillation={type: forward_kl_topk, top_k: 6, only: true}",
)
RUNS = {
    "a tag on two ranks": ("hybrid", "same", "{actor: [1, 2], rollout: [1, 1]}"),
    "ranks of its own": ("hybrid", "deep", "{actor: [1, 1], rollout: [1, 1], teacher: [1, 2]}"),
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that have learned nothing: of the actor's shape and of another."""
    root, tokenizer = tmp_path_factory.mktemp("teachers"), character_tokenizer(ALPHABET, eos="\n", pad=None)
    own = {**SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    own["pad_token_id"] = tokenizer.pad_token_id
    for name, shape in (("same", own), ("deep", {**own, "num_hidden_layers": 3})):
        save_pretrained_atomic(new_model(shape, seed=1), tokenizer, root / name)
    return {name: root / name for name in ("same", "deep")}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", RUNS)
def test_the_lesson_is_that_of_one_process(task: Path, teachers: dict[str, Path], tmp_path: Path, name: str) -> None:
    mode, taught_by, resource = RUNS[name]
    words = (task, *SMALL, f"actor_rollout_ref.teacher.path={teachers[taught_by]}")
    here = train(*words, f"execution={{mode: {mode}, max_staleness: 0}}", f"trainer.output_dir={tmp_path / 'here'}")
    execution = f"execution={{mode: {mode}, max_staleness: 0, resource: {resource}}}"
    there = train(
        *words,
        execution,
        "runtime={name: ray, threads: false, torch_threads: 1}",
        f"trainer.output_dir={tmp_path / 'r'}",
    )
    assert there.session.plan.runtime == "ray"
    assert ("teacher" in there.session.plan.tags) is (name == "a tag on two ranks")
    assert len(there.column("distill/kl")) == 2  # the second sees what the first step did
    assert there.column("distill/kl") == pytest.approx(here.column("distill/kl"), rel=1e-3)
