"""Whole runs with an engine from an environment of its own, and what they tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tandem import build_actor_rollout_ref, compute_grpo_loss
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tandem.observe.metrics import ROLLOUTS_FILE, read_rows
from tests.e2e.seven import ALPHABET, SHAPE, Run, make_task, train
from tests.engines.conftest import Installed

ROLLOUT = "actor_rollout_ref.rollout"
TIED = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
"""Of SmolLM2's family; heads of a size that the engines' kernels take."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seven")
    config = make_task(folder)
    tokenizer = character_tokenizer(ALPHABET, eos="\n", pad=None)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_pretrained_atomic(new_model({**TIED, **ids, "vocab_size": len(tokenizer)}, seed=0), tokenizer, folder / "tied")
    tree = yaml.safe_load(config.read_text("utf-8"))
    tree["actor_rollout_ref"]["model"]["path"] = str(folder / "tied")
    tree["runtime"]["threads"] = False
    tree["trainer"] |= {"total_steps": 2, "rollouts_per_step": 16}
    tree["algorithm"]["use_tis"] = True  # so that the engine's log-probs are compared with the trainer's in each step
    config.write_text(yaml.safe_dump(tree))
    return config


def run(task: Path, out: Path, installed: Installed, *words: str) -> Run:
    engine = (f"{ROLLOUT}.name={installed.name}", f"{ROLLOUT}.python={installed.python}")
    return train(task, f"trainer.output_dir={out}", *engine, *words)


def check(done: Run, most_lag: int) -> None:
    """Two steps on what the engine generated with the weights that it says."""
    assert len(done.rows) == 2
    assert all(row["time/push_probe"] > 0 for row in done.rows)
    assert all(0 <= row["lag/max"] <= most_lag for row in done.rows)
    assert all(row["mismatch/kl"] < 1e-5 for row in done.rows if row["lag/max"] == 0)
    assert all(row["optim/applied"] > 0 for row in done.rows)
    versions = {row["version"] for row in read_rows(done.output / ROLLOUTS_FILE)}
    assert versions <= set(range(2)) and 0 in versions


@pytest.mark.parametrize("on_update", ["wait", "abort", "keep"])
def test_two_steps_of_hybrid(task: Path, tmp_path: Path, installed: Installed, on_update: str) -> None:
    words = ("execution={mode: hybrid, max_staleness: 1}", f"{ROLLOUT}.on_weight_update={on_update}")
    check(run(task, tmp_path, installed, *words), 1)


def test_two_steps_in_turns(task: Path, tmp_path: Path, installed: Installed) -> None:
    check(run(task, tmp_path, installed, "execution={mode: colocate}"), 0)


@pytest.mark.ray
def test_two_steps_on_ray(task: Path, tmp_path: Path, installed: Installed) -> None:
    pytest.importorskip("ray")
    check(run(task, tmp_path, installed, "runtime.name=ray", "execution={mode: hybrid, max_staleness: 1}"), 1)


def test_it_takes_over_from_hf_between_two_steps(task: Path, tmp_path: Path, installed: Installed) -> None:
    swap = f"{ROLLOUT}.swap={{step: 1, name: {installed.name}, python: {installed.python}}}"
    check(train(task, f"trainer.output_dir={tmp_path}", "execution={mode: hybrid, max_staleness: 1}", swap), 1)


def test_it_takes_over_from_hf_in_a_loop_of_ones_own(task: Path, installed: Installed) -> None:
    made = build_actor_rollout_ref(load_words([str(task)], Config).actor_rollout_ref)
    prompts = ["1>", "2>", "3>"]
    samples = made.rollout(prompts)
    made.actor.step(compute_grpo_loss(samples, torch.linspace(0, 1, len(samples)), made))
    ours = made.rollout(prompts, temperature=0)
    made.swap_rollout(installed.name, python=installed.python)
    theirs = made.rollout(prompts, temperature=0)
    made.swap_rollout("hf")
    assert set(theirs.ragged("token_versions").values.tolist()) == {1}
    assert torch.equal(theirs.ragged("responses").values, ours.ragged("responses").values)
    assert torch.allclose(theirs.ragged("rollout_logprobs").values, ours.ragged("rollout_logprobs").values, atol=1e-4)
