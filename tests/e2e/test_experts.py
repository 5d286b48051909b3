"""A tiny mixture of experts, of the shape of Qwen3-MoE, learns the task with its engine's routes replayed."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tests.e2e.seven import ALPHABET, SHAPE, make_task, train

EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task with another model."""
    config = make_task(tmp_path_factory.mktemp("experts"))
    tokenizer = character_tokenizer(ALPHABET, eos="\n", pad=None)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = new_model({**SHAPE, **EXPERTS, **ids, "vocab_size": len(tokenizer)}, seed=0)
    save_pretrained_atomic(model, tokenizer, config.parent / "experts")
    return config


def test_it_learns_and_trains_on_the_experts_of_the_engine(task: Path) -> None:
    run = train(
        task,
        f"actor_rollout_ref.model.path={task.parent / 'experts'}",
        "actor_rollout_ref.actor.router_replay=true",
        "actor_rollout_ref.actor.router_aux_loss_coef=0.01",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "execution.mode=hybrid",
        "execution.max_staleness=0",
        "trainer.total_steps=35",
    )
    assert mean(run.rewards[:3]) <= 0.3 and mean(run.rewards[-3:]) >= 0.6
    assert max(run.column("mismatch/abs")) <= 1e-5
    assert max(run.column("moe/not_recorded")) == 0.0
    assert max(run.column("moe/replayed_otherwise")) <= 0.01  # these are the weights that sampled
    assert all(1.0 <= load <= 2.0 for load in run.column("moe/load_max"))
    assert max(run.column("moe/balance")) < 1.5
