"""Whole runs that play episodes: the loss sees sampled tokens alone, in each mode; trainer and engine agree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tandem.algorithms import ADVANTAGES
from tandem.base.errors import RewardError
from tandem.base.run_folder import REPORT_FILE
from tandem.columns.ragged import Ragged
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import load_tokenizer
from tandem.observe.metrics import ROLLOUTS_FILE, read_rows
from tandem.roles.advantages import token_rewards
from tests.e2e.seven import SHAPE, Run, equal, train, write_rows
from tests.e2e.test_experts import EXPERTS
from tests.episodes.conftest import EPISODE, MODES, PLAYS, TALK


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_on_what_was_sampled(task: Path, tmp_path: Path, mode: str) -> None:
    run = train(task, f"trainer.output_dir={tmp_path}", *MODES[mode], *TALK)
    assert run.session.run.progress.trained is not None
    batch = run.session.run.progress.trained[0]
    mask, logprobs = batch.ragged("response_mask"), batch.ragged("rollout_logprobs")
    assert isinstance(mask, Ragged) and not bool(mask.values.all()) and bool(mask.values.any())
    assert bool((logprobs.values[~mask.values] == 0).all())
    for line in run.rows:
        assert line["mismatch/abs"] <= 1e-5
        assert 1 <= line["episode/turns"] <= 2
        assert line["lag/max"] == 0
    shown = [message["role"] for message in read_rows(run.output / ROLLOUTS_FILE)[0]["messages"]]
    assert shown[:2] == ["user", "assistant"]


@pytest.mark.parametrize("mode", MODES)
def test_every_turn_is_credited_with_its_reward_and_those_after_it(task: Path, tmp_path: Path, mode: str) -> None:
    episode = f"{EPISODE}={{type: stepwise, file: {PLAYS}, turns: 2, turn_rewards: true}}"
    words = ("algorithm.adv_estimator={type: reinforce_plus_plus, gamma: 0.9}", "trainer.total_steps=1")
    run = train(task, f"trainer.output_dir={tmp_path}", *MODES[mode], episode, *words)
    assert run.session.run.progress.trained is not None
    batch = run.session.run.progress.trained[0]
    mask, given = batch.padded("response_mask", False).bool(), batch.padded("token_rewards")
    assert float(given[mask].sum()) > 0 and not bool(given[~mask].any())
    both = given + token_rewards(batch.dense("rewards"), mask)
    advantages, returns = ADVANTAGES["reinforce_plus_plus"].target(both, mask, gamma=0.9)
    torch.testing.assert_close(batch.padded("returns"), returns)
    torch.testing.assert_close(batch.padded("advantages"), advantages)
    (line,) = run.rows
    assert line["episode/turn_rewards"] == pytest.approx(line["episode/sampled"])
    assert line["reward/tokens"] == pytest.approx(line["episode/turn_rewards"])
    shown = read_rows(run.output / ROLLOUTS_FILE)[0]
    assert sum(shown["turn_rewards"]) > 0 and len(shown["turn_rewards"]) <= 2
    assert f"assistant ({shown['turn_rewards'][0]:+g}): " in (run.output / REPORT_FILE).read_text()


def test_a_critic_learns_from_the_rewards_of_turns(task: Path, tmp_path: Path) -> None:
    episode = f"{EPISODE}={{type: stepwise, file: {PLAYS}, turns: 2, turn_rewards: true}}"
    estimator = ("algorithm.adv_estimator={type: gae, lam: 0.9}", "critic.enable=true", "critic.optim.lr=0.01")
    run = train(task, f"trainer.output_dir={tmp_path}", episode, *estimator, "trainer.total_steps=4")
    assert run.session.run.progress.trained is not None
    batch = run.session.run.progress.trained[0]
    mask, given = batch.padded("response_mask", False).bool(), batch.padded("token_rewards")
    both = given + token_rewards(batch.dense("rewards"), mask)
    advantages, returns = ADVANTAGES["gae"].target(both, mask, batch.padded("values"), lam=0.9)
    torch.testing.assert_close(batch.padded("returns"), returns)
    torch.testing.assert_close(batch.padded("advantages"), advantages)
    losses = [line["value/loss"] for line in run.rows]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert all(line["grad/norm"] > 0 and line["episode/turn_rewards"] > 0 for line in run.rows)


@pytest.mark.parametrize("mode", ["colocate", "fully_async"])
def test_a_context_that_begins_anew_is_trained_as_the_model_saw_it(task: Path, tmp_path: Path, mode: str) -> None:
    episode = f"{EPISODE}={{type: forgetful, file: {PLAYS}, past: edited}}"
    limits = ("data.max_response_length=60", "trainer.total_steps=2")
    run = train(task, f"trainer.output_dir={tmp_path}", *MODES[mode], episode, *limits)
    assert run.session.run.progress.trained is not None
    assert int(run.session.run.progress.trained[0].ragged("restarts").values.sum()) > 0
    for line in run.rows:
        assert line["mismatch/abs"] <= 1e-5
        assert line["episode/rewritten"] > 0.5


def test_what_others_say_goes_to_the_experts_of_the_engine_too(task: Path, tmp_path: Path) -> None:
    """With one expert of many a token, a token that the trainer sent elsewhere would be seen in all that follow."""
    folder = task.parent / "model"
    tokenizer = load_tokenizer(str(folder))
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {**EXPERTS, "num_experts": 16, "num_experts_per_tok": 1, "norm_topk_prob": False, "initializer_range": 0.3}
    save_pretrained_atomic(
        new_model({**SHAPE, **shape, **ids, "vocab_size": len(tokenizer)}, seed=0), tokenizer, tmp_path / "model"
    )
    replay = (f"actor_rollout_ref.model.path={tmp_path / 'model'}", "actor_rollout_ref.actor.router_replay=true")
    run = train(task, f"trainer.output_dir={tmp_path / 'out'}", *TALK, *replay, "trainer.total_steps=2")
    assert run.session.run.progress.trained is not None
    batch = run.session.run.progress.trained[0]
    recorded, mask = (batch.ragged("routes").values != 255).any(-1), batch.ragged("response_mask").values
    assert bool(recorded[~mask].any())  # what others said
    for line in run.rows:
        assert line["mismatch/abs"] <= 1e-5 and line["moe/not_recorded"] == 0.0


def test_an_environment_of_verifiers_is_trained_token_by_token(task: Path, tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    episode = f"{EPISODE}={{type: verifiers, env: {Path(__file__).with_name('digits_env.py')}, max_turns: 4}}"
    words = ("data.max_response_length=60", "data.train_batch_size=2", "trainer.total_steps=1")
    run = train(task, f"trainer.output_dir={tmp_path}", episode, *words)
    (line,) = run.rows
    assert line["reward/scored"] == 8 and line["mismatch/abs"] <= 1e-5 and line["grad/norm"] > 0
    assert 1 < line["episode/turns"] <= 2


@pytest.mark.parametrize("mode", MODES)
def test_branches_are_trained_each_behind_what_it_saw(task: Path, tmp_path: Path, mode: str) -> None:
    episode = f"{EPISODE}={{type: branching, file: {PLAYS}, branches: 3}}"
    limits = ("data.max_response_length=88", "data.train_batch_size=2", "trainer.total_steps=2")
    run = train(task, f"trainer.output_dir={tmp_path}", *MODES[mode], episode, *limits)
    assert run.session.run.progress.trained is not None
    assert int(run.session.run.progress.trained[0].ragged("restarts").values.sum()) == 8 * 2
    for line in run.rows:
        assert line["mismatch/abs"] <= 1e-5 and line["grad/norm"] > 0
        assert line["reward/scored"] == 8 and line["episode/turns"] > 3
    run.session.plane.status().accounts.check()


def test_an_outside_program_is_trained_token_by_token(task: Path, tmp_path: Path) -> None:
    command = f"[{sys.executable}, {Path(__file__).with_name('agent.py')}, trims]"
    words = ("data.max_response_length=60", "data.train_batch_size=2", "trainer.total_steps=1")
    episode = f"{EPISODE}={{type: program, command: {command}, max_turns: 2}}"
    run = train(task, f"trainer.output_dir={tmp_path}", episode, *words)
    (line,) = run.rows
    assert line["reward/scored"] + line["reward/failed"] == 8 and line["reward/scored"] > 0
    assert line["reward/turns_seen"] == 2 and line["mismatch/abs"] <= 1e-5


@pytest.mark.parametrize("update", ["keep", "abort", "wait"])
def test_new_weights_may_come_between_and_within_turns(task: Path, tmp_path: Path, update: str) -> None:
    words = ("execution.mode=hybrid", "execution.max_staleness=1", "trainer.total_steps=4")
    run = train(
        task, f"trainer.output_dir={tmp_path}", *words, *TALK, f"actor_rollout_ref.rollout.on_weight_update={update}"
    )
    assert len(run.rows) == 4
    assert all(0 <= line["lag/max"] <= 1 for line in run.rows)
    run.session.plane.status().accounts.check()


def test_one_turn_of_an_episode_is_a_plain_answer(task: Path, tmp_path: Path) -> None:
    plain = train(task, f"trainer.output_dir={tmp_path / 'plain'}", "reward_manager.type=match_fraction")
    played = train(
        task,
        f"trainer.output_dir={tmp_path / 'played'}",
        "reward_manager.type=match_fraction",
        f"{EPISODE}={{type: once, file: {PLAYS}}}",
    )
    assert _answers(plain) == _answers(played)
    assert equal(plain.weights, played.weights)


def _answers(run: Run) -> list[list[int]]:
    assert run.session.run.progress.trained is not None
    return [row.tolist() for row in run.session.run.progress.trained[0].ragged("responses")]


def test_an_episode_that_fails_is_left_out_and_counted(task: Path, tmp_path: Path) -> None:
    run = train(task, f"trainer.output_dir={tmp_path}", f"{EPISODE}={{type: faulty, file: {PLAYS}}}")
    assert sum(line["reward/failed"] for line in run.rows) >= 4
    assert all(line["reward/scored"] + line["reward/failed"] == 32 for line in run.rows)


def early(tmp_path: Path, odds: int, on_error: str) -> tuple[str, ...]:
    """The words of a run of episodes of which some end before the model is asked anything."""
    episode = f"{EPISODE}={{type: early, file: {PLAYS}, odds: {odds}}}"
    return f"trainer.output_dir={tmp_path}", episode, f"reward_manager.on_error={on_error}"


@pytest.mark.parametrize("odds", [0, 3], ids=["whole groups", "some of each group"])
def test_rows_without_a_token_are_left_out_and_accounted_for(task: Path, tmp_path: Path, odds: int) -> None:
    run = train(task, *early(tmp_path, odds, "mask"))
    progress = run.session.run.progress
    assert progress.samples == "produced 96, trained 96, dropped 0, left in the queue 0"
    assert progress.trained is not None
    batch = progress.trained[0]
    empty = batch.ragged("responses").lengths == 0
    assert 0 < int(empty.sum()) < len(batch)
    assert torch.equal(batch.dense("reward_valid"), ~empty)
    assert run.rows[-1]["reward/failed"] == int(empty.sum())
    for line in run.rows:
        assert line["reward/scored"] + line["reward/failed"] == 32
        assert line["mismatch/abs"] <= 1e-5 and line["grad/norm"] > 0
    assert run.rows[-1]["updates"] == 3


def test_groups_with_a_row_without_a_token_are_drawn_anew(task: Path, tmp_path: Path) -> None:
    run = train(task, *early(tmp_path, 12, "refill"))
    accounts = run.session.plane.status().accounts
    accounts.check()
    (dropped,) = accounts.dropped.values()
    assert dropped > 0 and dropped % 4 == 0
    assert (accounts.produced, accounts.trained, accounts.queued) == (96 + dropped, 96, 0)
    assert run.session.run.progress.trained is not None
    assert int(run.session.run.progress.trained[0].ragged("responses").lengths.min()) > 0


def test_a_row_without_a_token_ends_a_run_that_may_have_none(task: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"no reward for .*no wheels"):
        train(task, *early(tmp_path, 3, "stop"))


def test_evaluations_play_episodes_and_the_report_shows_their_turns(task: Path, tmp_path: Path) -> None:
    rows = [{"prompt": str(d), "answer": "", "fate": "well"} for d in range(10, 14)]
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    words = (f"{EPISODE}={{type: told, file: {PLAYS}}}", f"data.val_files=[{held_out}]")
    limits = ("trainer.total_steps=1", "data.max_response_length=60")
    sampled = "evaluation={interval: 1, temperature: 1.0}"
    run = train(task, f"trainer.output_dir={tmp_path / 'run'}", *words, *limits, sampled)
    (trained, *_), (evaluated, *_) = ([row for row in run.rows if key in row] for key in ("reward/mean", "eval/reward"))
    assert 1 <= trained["reward/first_turn"] <= 60
    assert 1 <= evaluated["eval/episode/turns"] <= 2 and evaluated["eval/episode/cut_turns"] == 0
    assert evaluated["eval/episode/sampled"] < evaluated["eval/length"]  # which has the tool's words, too
    page = (run.output / REPORT_FILE).read_text()
    assert "Turns of an episode" in page and "\ntool: 17\nassistant: " in page
