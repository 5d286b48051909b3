"""Whole runs that play episodes: the loss sees sampled tokens alone, in each mode; trainer and engine agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tandem.columns.ragged import Ragged
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tandem.observe.metrics import ROLLOUTS_FILE, read_rows
from tests.e2e.seven import SHAPE, Run, equal, train, write_rows

HERE = Path(__file__).parent
EPISODE = "actor_rollout_ref.rollout.episode"
TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '=' if m.role == 'tool' else '' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}{# tools #}"
)
TALK = (f"{EPISODE}={{type: talk, file: {HERE / 'plays.py'}, turns: 2}}",)
MODES = {
    "colocate": (),
    "hybrid": ("execution.mode=hybrid", "execution.max_staleness=0", "execution.num_iters_per_train_update=2"),
    "fully_async": ("execution.mode=fully_async", "execution.max_staleness=0"),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can chat, and the config of a run."""
    folder = tmp_path_factory.mktemp("talks")
    torch.set_num_threads(1)
    tokenizer = character_tokenizer("\n0123456789<=[]()adxy,", eos="\n", pad=None)
    tokenizer.chat_template = TEMPLATE
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = new_model({**SHAPE, **ids, "vocab_size": len(tokenizer)}, seed=0)
    save_pretrained_atomic(model, tokenizer, folder / "model")
    rows = [{"prompt": str(d), "answer": str(d), "fate": "raises" if d == 3 else "well"} for d in range(10)]
    write_rows(folder / "train.jsonl", rows)
    tree = {
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {"optim": {"lr": 3.0e-3}},
            "rollout": {"n": 4},
        },
        "algorithm": {"old_logprobs": "recompute"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "train_batch_size": 8,
            "max_prompt_length": 8,
            "max_response_length": 40,
            "chat": True,
            "extra_keys": ["fate"],
        },
        "trainer": {"total_steps": 3, "output_dir": str(folder / "out"), "logger": []},
        "runtime": {"torch_threads": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


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
        f"{EPISODE}={{type: once, file: {HERE / 'plays.py'}}}",
    )
    assert _answers(plain) == _answers(played)
    assert equal(plain.weights, played.weights)


def _answers(run: Run) -> list[list[int]]:
    assert run.session.run.progress.trained is not None
    return [row.tolist() for row in run.session.run.progress.trained[0].ragged("responses")]


def test_an_episode_that_fails_is_left_out_and_counted(task: Path, tmp_path: Path) -> None:
    run = train(task, f"trainer.output_dir={tmp_path}", f"{EPISODE}={{type: faulty, file: {HERE / 'plays.py'}}}")
    assert sum(line["reward/failed"] for line in run.rows) >= 4
    assert all(line["reward/scored"] + line["reward/failed"] == 32 for line in run.rows)
