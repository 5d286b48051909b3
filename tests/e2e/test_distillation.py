"""A student learns from a teacher: alone or beside a reward, from tags or from models beside it, in every mode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import mean

import pytest

from tandem.base.errors import ConfigError, DataError
from tandem.config.load import load_words
from tandem.control.entry import run_train
from tandem.control.eval import run_eval
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer, load_tokenizer
from tandem.plan.plan import compile_plan
from tests.e2e.seven import ALPHABET, SHAPE, Run, equal, started, train, training_rank, write_rows

ONLY = {
    "reverse_kl": "{type: reverse_kl, only: true}",
    "forward_kl_topk": "{type: forward_kl_topk, only: true, top_k: 6}",
    "jsd_topk": "{type: jsd_topk, only: true, top_k: 6}",
}
WATCHED = "reward_manager={type: match_fraction}"
SHORT = ("trainer.total_steps=2", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2")


@pytest.fixture(scope="module")
def teacher(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the task: it answers three digits in four rightly, and more."""
    folder = tmp_path_factory.mktemp("teacher")
    run = train(task, f"trainer.output_dir={folder}", "trainer.total_steps=42")
    assert mean(run.rewards[-3:]) > 0.75
    return folder / "final"


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape and the same tokenizer, that has learned nothing."""
    folder = tmp_path_factory.mktemp("big") / "model"
    tokenizer = character_tokenizer(ALPHABET, eos="\n", pad=None)
    shape = {**SHAPE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 20}
    save_pretrained_atomic(new_model(shape, seed=1), tokenizer, folder)
    return folder


def by(path: Path) -> str:
    return f"actor_rollout_ref.teacher.path={path}"


def distillation(written: str) -> str:
    return f"algorithm.distillation={written}"


# -- learning --


@pytest.mark.parametrize("kind", ONLY)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_a_fresh_student_learns_from_its_teacher_alone(
    task: Path, teacher: Path, tmp_path: Path, kind: str, seed: int
) -> None:
    """The reward is only watched; it starts near 0.08, that of uniform tokens."""
    run = train(
        task,
        by(teacher),
        distillation(ONLY[kind]),
        WATCHED,
        f"trainer.output_dir={tmp_path}",
        "trainer.total_steps=16",
        f"trainer.seed={seed}",
    )
    assert mean(run.rewards[-3:]) >= run.rewards[0] + 0.25
    gaps = run.column("distill/kl")
    assert gaps[-1] < 0.6 * gaps[0] and min(gaps) >= 0
    assert "loss/clipfrac" in run.rows[-1] or kind != "reverse_kl"


def test_reward_and_teacher_train_together(task: Path, teacher: Path, tmp_path: Path) -> None:
    run = train(
        task,
        by(teacher),
        distillation("{type: reverse_kl}"),
        "trainer.total_steps=10",
        f"trainer.output_dir={tmp_path}",
    )
    assert mean(run.rewards[-3:]) >= run.rewards[0] + 0.1
    assert run.column("distill/kl")[-1] < run.column("distill/kl")[0] - 0.5
    trained = run.session.run.progress.trained
    assert trained is not None and {"advantages", "teacher_logprobs"} <= set(trained[0].columns)


@pytest.mark.long
def test_each_source_follows_its_own_teacher(task: Path, teacher: Path, tmp_path: Path) -> None:
    """Digits below 5 learn from a teacher of 7777 to ``7>``, the others from one that answers the next digit."""
    rows = [{"prompt": f"{d}>", "answer": str((d + 1) % 10) * 4} for d in range(10)]
    other = write_rows(tmp_path / "other.jsonl", rows)
    contrary = tmp_path / "contrary"
    train(task, f"data.train_files=[{other}]", f"trainer.output_dir={contrary}", "trainer.total_steps=40")
    rows = [
        {"prompt": f"{d}>", "answer": str(d if d < 5 else (d + 1) % 10) * 4, "kind": "same" if d < 5 else "next"}
        for d in range(10)
    ]
    run = train(
        task,
        f"data.train_files=[{write_rows(tmp_path / 'mixed.jsonl', rows)}]",
        "data.data_source_key=kind",
        f"actor_rollout_ref.teacher.by_source={{same: {teacher}, next: {contrary / 'final'}}}",
        distillation(ONLY["forward_kl_topk"]),
        WATCHED,
        f"trainer.output_dir={tmp_path / 'run'}",
        "trainer.total_steps=22",
        "trainer.rollouts_per_step=16",
    )
    assert run.session.plan.tags == ("actor", "teacher:same", "teacher:next")
    recorded = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()][-64:]
    for below in (True, False):
        rewards = [record["reward"] for record in recorded if (int(record["prompt"][0]) < 5) is below]
        assert mean(rewards) > 0.4  # at the start 0.08; after the other's teacher none would be right


# -- where a teacher is --


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl_topk"])
def test_modes_give_the_same_weights(task: Path, teacher: Path, tmp_path: Path, kind: str) -> None:
    """At staleness 0: tags in colocate and hybrid, a role in fully_async; all bit by bit."""
    words = (task, by(teacher), distillation(ONLY[kind]), *SHORT, "trainer.exact=true")
    recompute = "algorithm.old_logprobs=recompute"
    synchronous = train(*words, recompute, f"trainer.output_dir={tmp_path / 'colocate'}")
    for name, execution in {
        "hybrid": "{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 4}",
        "fully_async": "{mode: fully_async, max_staleness: 0, num_iters_per_train_update: 4}",
    }.items():
        run = train(*words, recompute, f"execution={execution}", f"trainer.output_dir={tmp_path / name}")
        assert equal(run.weights, synchronous.weights), name
        assert [row["distill/kl"] for row in run.rows] == [row["distill/kl"] for row in synchronous.rows]
    accumulated = "{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 4, train_pipelining: accumulate}"
    run = train(*words, f"execution={accumulated}", f"trainer.output_dir={tmp_path / 'accumulate'}")
    assert run.column("distill/kl") == pytest.approx(synchronous.column("distill/kl"), rel=1e-4)


def test_a_tag_and_a_model_beside_teach_the_same(task: Path, teacher: Path, tmp_path: Path) -> None:
    """Another spelling of the same architecture makes it a model of its own."""
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "my_note": 1}))
    (copy / "manifest.json").unlink()  # the change is meant
    runs = [
        train(task, by(path), distillation(ONLY["reverse_kl"]), *SHORT, f"trainer.output_dir={tmp_path / name}")
        for name, path in (("tag", teacher), ("beside", copy))
    ]
    assert [run.session.plan.tags for run in runs] == [("actor", "teacher"), ("actor",)]
    assert runs[1].session.plan.roles == ("actor", "rollout", "teacher")
    assert equal(runs[0].weights, runs[1].weights)


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "fully_async"])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl_topk"])
def test_a_teacher_of_another_shape_and_a_larger_vocabulary(
    task: Path, big: Path, tmp_path: Path, mode: str, kind: str
) -> None:
    words = (by(big), distillation(ONLY[kind]), f"execution.mode={mode}", *SHORT)
    run = train(task, *words, f"trainer.output_dir={tmp_path}")
    assert len(run.column("distill/kl")) == 2
    batch = run.session.run.progress.trained[0]  # type: ignore[index]
    if kind == "forward_kl_topk":
        assert batch.ragged("teacher_topk_ids").values.shape[1] == 6
        assert int(batch.ragged("teacher_topk_ids").values.max()) < len(ALPHABET) + 1
    else:
        assert bool((batch.ragged("teacher_logprobs").values < 0).all())


def test_an_adapted_student_has_its_teacher_beside_it(task: Path, teacher: Path, tmp_path: Path) -> None:
    run = train(
        task,
        by(teacher),
        distillation(ONLY["forward_kl_topk"]),
        "actor_rollout_ref.model.lora_rank=4",
        "algorithm.kl={in: loss, coef: 0.001}",
        *SHORT,
        f"trainer.output_dir={tmp_path}",
    )
    assert "teacher" not in run.session.plan.tags and "ref" in run.session.plan.base_tags
    gaps = run.column("distill/kl")
    assert gaps[0] > 1 and len(gaps) == 2


# -- what a step does --


@pytest.mark.parametrize("kind", ONLY)
def test_executed_stages_and_columns_are_the_planned_ones(task: Path, teacher: Path, tmp_path: Path, kind: str) -> None:
    words = (by(teacher), "algorithm.kl.in=loss", "algorithm.old_logprobs=recompute", *SHORT)
    run = train(task, *words, distillation(ONLY[kind]), f"trainer.output_dir={tmp_path}")
    plan, progress = run.session.plan, run.session.run.progress
    assert progress.executed == [stage.name for stage in plan.stages]
    assert progress.executed == ["rollout", "reward", "ref", "teacher", "old", "train", "publish"]
    assert progress.trained is not None
    batch = progress.trained[0]
    planned = {*plan.source_columns, *(column for stage in plan.stages for column in stage.gives)}
    assert {*batch.columns, *batch.non_tensor_batch} == planned
    assert "time/teacher" in run.rows[-1]
    assert set(run.session.composite.objective.columns) <= set(plan.stages[-2].needs)


def test_weight_0_loads_no_teacher(task: Path, teacher: Path, tmp_path: Path) -> None:
    with started(
        task, by(teacher), "algorithm.distillation={coef: 0.0}", *SHORT, f"trainer.output_dir={tmp_path}"
    ) as session:
        assert training_rank(session).weights.tags == []


def test_a_student_is_evaluated_without_its_teacher(
    task: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = write_rows(tmp_path / "val.jsonl", [{"prompt": "33>", "answer": "3333"}])
    out = tmp_path / "run"
    config = load_words([str(task), by(teacher), distillation(ONLY["reverse_kl"]), *SHORT, f"trainer.output_dir={out}"])
    run_train(config, compile_plan(config))
    monkeypatch.setattr("tandem.runtime.build.composite.load_teachers", None)  # whoever calls it fails
    words = [f"data.val_files=[{held_out}]", "data.max_prompt_length=4"]
    with pytest.raises(DataError, match="nothing scores"):
        run_eval(out, [*words, "reward_manager.type=none"])
    capsys.readouterr()
    assert run_eval(out, words) == 0
    assert "eval/reward" in capsys.readouterr().out


def test_a_resumed_run_goes_on_as_if_nothing_had_been(task: Path, teacher: Path, tmp_path: Path) -> None:
    """The teacher is loaded again, not kept in the checkpoint."""
    words = (task, by(teacher), distillation(ONLY["reverse_kl"]), *SHORT[1:], "algorithm.kl.in=loss")

    def run(name: str, *more: str) -> Run:
        return train(*words, *more, f"trainer.output_dir={tmp_path / name}")

    straight = run("straight", "trainer.total_steps=3")
    run("halted", "trainer.total_steps=2", "trainer.save_interval=1")
    resumed = run("halted", "trainer.total_steps=3", "trainer.resume=auto")
    assert equal(resumed.weights, straight.weights)
    saved = training_rank(resumed.session)._state()["tags"]
    assert set(saved) == {"ref"}


# -- what is refused before a model is loaded --


def test_a_row_without_a_teacher_is_named(task: Path, teacher: Path, tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"{d}>", "answer": "0", "kind": "xy"[d == 3]} for d in range(6)]
    )
    words = (
        task,
        f"data.train_files=[{rows}]",
        "data.data_source_key=kind",
        f"actor_rollout_ref.teacher.by_source={{x: {teacher}}}",
        distillation(ONLY["reverse_kl"]),
        *SHORT,
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    with pytest.raises(DataError, match=r"rows.jsonl, row 4.*'y' has no teacher; 'x'.*teacher.path"):
        train(*words)
    assert train(*words, "data.on_bad_row=drop").session.source.counts.dropped == {"no teacher": 1}
    train(*words, by(teacher))


def test_another_tokenizer_is_refused_though_the_plan_could_not_read_it(
    task: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(teacher, odd)
    character_tokenizer(ALPHABET[::-1], eos="\n", pad=None).save_pretrained(odd)
    (odd / "manifest.json").unlink()  # the change is meant
    words = (task, by(odd), distillation(ONLY["reverse_kl"]), *SHORT, f"trainer.output_dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="tokenizer is another"):
        train(*words)
    monkeypatch.setattr("tandem.plan.checks.learning.teacher.vocabulary_of", lambda folder: None)
    with pytest.raises(ConfigError, match="tokenizer is another than the actor's: token"):
        train(*words)
    assert load_tokenizer(teacher).get_vocab() != load_tokenizer(odd).get_vocab()


def test_weights_that_dont_fit_their_config_are_told(task: Path, teacher: Path, big: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(big, mixed)
    shutil.copy(teacher / "config.json", mixed / "config.json")
    with pytest.raises(ConfigError, match="mixed"):
        train(task, by(mixed), distillation(ONLY["reverse_kl"]), *SHORT, f"trainer.output_dir={tmp_path / 'run'}")
