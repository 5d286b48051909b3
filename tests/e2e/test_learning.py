"""A model learns, with every part of the algorithm that can be switched on."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.seven import Run, equal, train, training_engine, write_rows

SHORT = ("data.train_batch_size=8", "trainer.total_steps=25")


def test_the_task_is_learned(learned: Run) -> None:
    rewards = learned.rewards
    assert len(rewards) == 60
    assert mean(rewards[:3]) <= 0.4
    assert mean(rewards[-5:]) >= 0.7


def test_every_step_has_one_line_that_tells_all_of_it(learned: Run) -> None:
    assert [row["step"] for row in learned.rows] == list(range(61))
    last = learned.rows[-1]
    assert (last["version"], last["updates"]) == (60, 60)
    named = ("reward/mean", "lag/max", "mismatch/abs", "mismatch/kl", "length/mean", "grad/norm", "optim/lr")
    for key in (*named, "time/rollout", "time/train", "time/step", "throughput/tokens_per_second", "loss/policy"):
        assert isinstance(last[key], float), key
    assert max(learned.column("lag/max")) == 0
    assert max(learned.column("mismatch/abs")) < 1e-4


def test_samples_are_conserved(learned: Run) -> None:
    accounts = learned.session.plane.status().accounts
    accounts.check()
    assert (accounts.produced, accounts.trained, accounts.queued, accounts.dropped) == (60 * 128, 60 * 128, 0, {})


def test_every_prompt_is_trained_as_often_as_its_epochs_say(learned: Run) -> None:
    drawn = Counter(prompt for step in learned.prompts for prompt in step)
    assert sum(drawn.values()) == 60 * 16
    assert set(drawn.values()) == {96}  # 96 epochs of 10 prompts


def test_evaluation_stands_in_the_lines_of_its_steps(learned: Run) -> None:
    evaluated = [row["step"] for row in learned.rows if "eval/reward" in row]
    assert evaluated == [0, 20, 40, 60]
    scores = learned.column("eval/reward")
    assert scores[0] <= 0.4 and scores[-1] >= 0.7
    assert learned.column("eval/mean@4") == scores
    assert all(
        one <= four for one, four in zip(learned.column("eval/pass@1"), learned.column("eval/pass@4"), strict=True)
    )


def test_the_saved_model_answers_with_plain_transformers_as_reported(learned: Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(learned.output / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(learned.output / "final")
    right = 0.0
    for digit in range(10):
        ids = tokenizer(f"{digit}>", return_tensors="pt", add_special_tokens=False)["input_ids"]
        torch.manual_seed(0)
        answers = model.generate(ids, max_new_tokens=4, do_sample=True, top_k=0, num_return_sequences=16)
        texts = tokenizer.batch_decode(answers[:, 2:], skip_special_tokens=True)
        right += sum(a == str(digit) for text in texts for a in text) / 64
    assert right / 10 == pytest.approx(mean(learned.rewards[-5:]), abs=0.1)
    saved = AutoModelForCausalLM.from_pretrained(learned.output / "checkpoints" / "step_00000060" / "model")
    assert equal(saved.state_dict(), model.state_dict())
    assert equal(dict(model.state_dict()), learned.weights)


def test_a_run_leaves_its_record(learned: Run) -> None:
    out = learned.output
    report = (out / "report.html").read_text()
    assert "reward/mean" in report and "http" not in report.replace("http://www.w3.org", "")
    assert len((out / "rollouts.jsonl").read_text().splitlines()) == 60 * 16
    record = json.loads((out / "rollouts.jsonl").read_text().splitlines()[-1])
    assert record.keys() >= {"step", "prompt", "response", "reward", "ground_truth", "version"}
    assert record["step"] == 60 and record["version"] == 59
    assert any((out / "tensorboard").iterdir())
    names = {event["name"] for event in json.loads((out / "trace.json").read_text())}
    assert {"rollout", "train", "step", "evaluation", "save"} <= names


VARIANTS = {
    "rloo, KL and entropy in the loss": (
        "algorithm.adv_estimator=rloo",
        "algorithm.kl.in=loss",
        "algorithm.kl.coef=0.003",
        "algorithm.entropy_coef=0.003",
    ),
    "reinforce++, adaptive KL in the reward": (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.kl.in=reward",
        "algorithm.kl.coef=0.003",
        "algorithm.kl.type=k1",
        "algorithm.kl.controller=adaptive",
    ),
    "grpo with std, TIS, two mini-batches, two epochs": (
        "algorithm.adv_estimator=grpo",
        "algorithm.use_tis=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.total_steps=15",
    ),
    "dr_grpo, mean over sequences, small micro-batches, a schedule": (
        "algorithm.adv_estimator=dr_grpo",
        "algorithm.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "actor_rollout_ref.actor.optim.schedule=cosine",
        "actor_rollout_ref.actor.optim.warmup_steps=2",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.3",
    ),
    "bfloat16": ("actor_rollout_ref.model.dtype=bfloat16",),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_learn(task: Path, tmp_path: Path, name: str) -> None:
    run = train(task, f"trainer.output_dir={tmp_path}", *SHORT, *VARIANTS[name])
    rewards = run.rewards
    assert mean(rewards[-4:]) >= mean(rewards[:4]) + 0.15
    assert run.rows[-1]["updates"] == len(rewards) * run.session.plan.batch.optimizer_steps
    assert all(value is not None for row in run.rows for value in row.values())
    if "KL" in name:
        assert run.column("kl/reward" if "reward" in name else "kl/mean")[-1] > run.column("mismatch/k3")[-1] >= 0
    if "entropy" in name:
        assert run.column("entropy/mean")[0] == pytest.approx(math.log(13), rel=0.1)
    if "TIS" in name:
        assert run.rows[-1]["optim/applied"] == 4
        assert "mismatch/ratio_max" in run.rows[-1]


def test_prompts_and_answers_of_many_lengths(task: Path, tmp_path: Path) -> None:
    dice = random.Random(0)
    rows = [{"prompt": str(i % 10) * dice.randint(2, 39) + ">", "answer": str(i % 10)} for i in range(100)]
    scorer = tmp_path / "share.py"
    scorer.write_text(
        "def share(response, ground_truth):\n    return response.count(ground_truth) / max(1, len(response))\n"
    )
    run = train(
        task,
        f"trainer.output_dir={tmp_path / 'run'}",
        f"data.train_files=[{write_rows(tmp_path / 'rows.jsonl', rows)}]",
        "data.max_prompt_length=40",
        "data.max_response_length=30",
        "reward_manager.type=share",
        f"reward_manager.file={scorer}",
        "data.train_batch_size=8",
        "trainer.total_steps=20",
    )
    assert mean(run.rewards[-4:]) >= mean(run.rewards[:4]) + 0.15
    assert max(run.column("length/max")) == 30 and min(run.column("length/mean")) < 20
    assert max(run.column("mismatch/abs")) < 1e-4


def test_lora_learns_with_the_base_weights_left_alone(task: Path, learned: Run, tmp_path: Path) -> None:
    base = learned.output / "checkpoints" / "step_00000010" / "model"
    run = train(
        task,
        f"trainer.output_dir={tmp_path}",
        f"actor_rollout_ref.model.path={base}",
        "actor_rollout_ref.model.lora_rank=8",
        "algorithm.kl.in=loss",
        "algorithm.kl.coef=1e-4",
        "trainer.total_steps=30",
    )
    assert mean(run.rewards[-4:]) >= mean(run.rewards[:2]) + 0.05
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    assert equal(after, run.weights)
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed and all(name.endswith("proj.weight") for name in changed)
    assert len(training_engine(run.session).shards()) == 2 * len(changed)
    assert run.column("kl/mean")[0] == pytest.approx(0, abs=1e-6)
    assert run.column("kl/mean")[-1] > 1e-4
