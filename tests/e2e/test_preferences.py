"""Preference training from a config: it learns, by every loss; it resumes; adapters; what is planned is what runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tandem.algorithms import PREFERENCE_LOSSES
from tandem.base.errors import ConfigError, DataError
from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control.preferences import train_preferences
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import compile_plan
from tandem.runtime.build.composite import build_actor_rollout_ref
from tandem.session.preferences import PreferenceSession, build_preference_session
from tests.e2e.seven import equal, write_rows

TIMES = ("time/", "cpu/", "throughput/", "system/")


@pytest.fixture(scope="module")
def words(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """To ``7>`` the answer ``7777`` is better than ``8888``; held out: the same after two digits, ``77>``."""
    place = tmp_path_factory.mktemp("preferences")
    pairs = [
        {"prompt": f"{d}>", "chosen": str(d) * 4, "rejected": str((d + k) % 10) * 4} for d in range(10) for k in (1, 4)
    ]
    held_out = [{**row, "prompt": f"{row['prompt'][0]}{row['prompt']}"} for row in pairs]
    labels = [
        {"prompt": row["prompt"], "response": row[key], "good": key == "chosen"}
        for row in pairs
        for key in ("chosen", "rejected")
    ]
    write_rows(place / "labels.jsonl", labels)
    return (
        str(task),
        f"data.train_files=[{write_rows(place / 'pairs.jsonl', pairs)}]",
        f"data.val_files=[{write_rows(place / 'held_out.jsonl', held_out)}]",
        "data.max_prompt_length=3",
        "data.max_response_length=5",
        "data.train_batch_size=10",
        "actor_rollout_ref.rollout.n=1",
        "trainer.total_steps=12",
        "evaluation.interval=12",
        "evaluation.at_start=true",
    )


def prepare(*words: str) -> PreferenceSession:
    config = load_words(list(words), Config)
    return build_preference_session(config, compile_plan(config))


def train(*words: str) -> PreferenceSession:
    session = prepare(*words)
    with session.run.running():
        train_preferences(session)
    return session


def run(*arguments: object) -> str:
    """What a command of ``tandem`` says."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def loss(name: str, **parameters: float) -> str:
    return f"algorithm.policy_loss={{type: {name}{''.join(f', {k}: {v}' for k, v in parameters.items())}}}"


def rows_of(session: PreferenceSession) -> list[Mapping[str, Any]]:
    return read_rows(session.run.output_dir / METRICS_FILE)


def lines(session: PreferenceSession) -> list[dict[str, Any]]:
    """The lines of steps after which both a run of 4 steps and one of 7 do the same."""
    rows = [row for row in rows_of(session) if row["step"] != 4]  # evaluated as the last one
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def weights(session: PreferenceSession) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in session.actor.export()}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES.names())
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_loss_learns_to_tell_held_out_answers_apart(
    words: tuple[str, ...], tmp_path: Path, name: str, seed: int
) -> None:
    session = train(*words, loss(name), f"trainer.seed={seed}", f"trainer.output_dir={tmp_path}")
    start, *_, end = rows_of(session)
    assert end["updates"] == 12
    assert end["eval/accuracy"] >= start["eval/accuracy"] + 0.3
    assert end["eval/loss"] < start["eval/loss"]
    margin = "eval/chosen_reward", "eval/rejected_reward"
    assert end[margin[0]] - end[margin[1]] > start[margin[0]] - start[margin[1]]


def test_labelled_answers_are_learned_from(words: tuple[str, ...], tmp_path: Path) -> None:
    labels = Path(words[1].removeprefix("data.train_files=[").removesuffix("]")).with_name("labels.jsonl")
    session = train(
        *words, loss("kto"), f"data.train_files=[{labels}]", "data.label_key=good", f"trainer.output_dir={tmp_path}",
        "data.val_files=[]", "evaluation.interval=0", "evaluation.at_start=false", "trainer.total_steps=20",
    )  # fmt: skip
    first, *_, last = rows_of(session)
    assert session.plan.batch.samples == 10
    assert first["preference/accuracy"] <= 0.6 and last["preference/accuracy"] >= 0.8
    assert last["preference/chosen_reward"] > 0 > last["preference/rejected_reward"]
    assert "preference/reference_point" in last


EXPECTED = {
    "dpo": ["ref", "train"],
    "ipo": ["ref", "train"],
    "kto": ["ref", "reference_point", "train"],
    "orpo": ["train"],
    "simpo": ["train"],
}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES.names())
def test_executed_stages_and_columns_are_the_planned_ones(words: tuple[str, ...], tmp_path: Path, name: str) -> None:
    session = train(*words, loss(name), "trainer.total_steps=1", f"trainer.output_dir={tmp_path}")
    plan, progress = session.plan, session.run.progress
    assert progress.executed == [stage.name for stage in plan.stages] == EXPECTED[name]
    assert progress.trained is not None
    batch = progress.trained[0]
    assert set(batch.columns) == {*plan.source_columns, *(column for stage in plan.stages for column in stage.gives)}
    assert plan.roles == ("actor",)
    assert plan.tags == (("actor", "ref") if "ref" in EXPECTED[name] else ("actor",))
    assert {*session.objective.columns, "prompts", "responses", "response_mask"} == set(plan.stages[-1].needs)


def test_dpo_starts_at_log_two_and_pairs_share_their_prompt(words: tuple[str, ...], tmp_path: Path) -> None:
    session = train(*words, loss("dpo"), "trainer.total_steps=1", f"trainer.output_dir={tmp_path}")
    row = rows_of(session)[-1]
    assert row["loss/policy"] == pytest.approx(0.6931, abs=1e-3)
    assert row["preference/margin"] == pytest.approx(0.0, abs=1e-4)
    assert rows_of(session)[0]["eval/accuracy"] == 0.5  # a model that is its own reference


def test_a_resumed_run_is_bit_equal_to_one_never_interrupted(words: tuple[str, ...], tmp_path: Path) -> None:
    some = (
        *words, loss("dpo"), "trainer.save_interval=2", "actor_rollout_ref.ref.update_interval=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5", "evaluation.interval=3", "data.train_batch_size=5",
    )  # fmt: skip
    whole = train(*some, "trainer.total_steps=7", f"trainer.output_dir={tmp_path / 'whole'}")
    parts = (f"trainer.output_dir={tmp_path / 'parts'}", "trainer.resume=auto")
    train(*some, "trainer.total_steps=4", *parts)
    resumed = train(*some, "trainer.total_steps=7", *parts)
    assert equal(weights(whole), weights(resumed))
    assert lines(whole) == lines(resumed)
    with pytest.raises(ConfigError, match=r"trainer\.seed = 1: the saved run has 0"):
        prepare(*some, "trainer.seed=1", *parts)
    with pytest.raises(ConfigError, match=r"the saved run has 5.*train_batch_size: 5"):
        prepare(*some, "data.train_batch_size=10", *parts)


def test_adapters_learn_against_the_base_model(words: tuple[str, ...], tmp_path: Path) -> None:
    session = train(
        *words, loss("dpo"), "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.optim.lr=0.01",
        f"trainer.output_dir={tmp_path}",
    )  # fmt: skip
    start, *_, end = rows_of(session)
    assert end["eval/accuracy"] >= start["eval/accuracy"] + 0.3
    assert rows_of(session)[1]["loss/policy"] == pytest.approx(0.6931, abs=1e-3)


def test_a_saved_adapter_is_evaluated_against_its_base(words: tuple[str, ...], tmp_path: Path) -> None:
    some = (
        *words, loss("kto"), "actor_rollout_ref.model.lora_rank=4", "trainer.export=adapter", "trainer.total_steps=2",
        "evaluation.interval=2", f"trainer.output_dir={tmp_path}",
    )  # fmt: skip
    assert run("train", *some)
    found = dict(line.split() for line in run("eval", tmp_path).splitlines() if line.startswith("eval/"))
    last = read_rows(tmp_path / METRICS_FILE)[-1]
    told = {key: float(value) for key, value in found.items()}
    assert told == pytest.approx({key: last[key] for key in found}, abs=1e-3)
    assert abs(told["eval/chosen_reward"]) > 0.01


def test_micro_batches_do_not_show_in_the_weights(words: tuple[str, ...], tmp_path: Path) -> None:
    runs = [
        train(
            *words, loss(name), "trainer.total_steps=1", f"trainer.output_dir={tmp_path / name / str(budget)}",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget}", "evaluation.interval=0",
        )
        for name in ("dpo", "kto")
        for budget in (16, 4096)
    ]  # fmt: skip
    for small, large in ((runs[0], runs[1]), (runs[2], runs[3])):
        one, other = rows_of(small)[-1], rows_of(large)[-1]
        for key in ("loss/policy", "grad/norm", "preference/chosen_logprob"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key


def test_the_command_tells_what_came_of_it_and_evaluates_the_run(words: tuple[str, ...], tmp_path: Path) -> None:
    planned = run("plan", *words, loss("dpo"))
    assert "answers are given, nothing is generated" in planned and "rollout_logprobs" not in planned
    said = run("train", *words, loss("dpo"), f"trainer.output_dir={tmp_path}")
    assert "accuracy: 0.500 -> " in said and "held-out loss: 0.693 -> " in said
    found = dict(line.split() for line in run("eval", tmp_path).splitlines() if line.startswith("eval/"))
    last = read_rows(tmp_path / METRICS_FILE)[-1]
    assert {key: f"{last[key]:.4f}" for key in found} == found
    assert {"eval/loss", "eval/accuracy", "eval/margin"} <= found.keys()


def test_a_loop_of_ones_own_that_generates_is_refused(words: tuple[str, ...]) -> None:
    config = load_words([*words, loss("dpo")], Config)
    with pytest.raises(ConfigError, match=r"policy_loss.type = 'dpo': it learns from given answers.*ppo_clip"):
        build_actor_rollout_ref(config.actor_rollout_ref)


def test_an_evaluation_without_held_out_preferences_is_refused(words: tuple[str, ...]) -> None:
    source = "data.source={file: examples/quickstart/sums.py, type: SumsWithErrors, rows: 5}"
    with pytest.raises(DataError, match="no column 'chosen'"):
        prepare(*words, loss("dpo"), "data.train_files=[]", "data.val_files=[]", source)
