"""A stage of a plug-in in every mode: the process reward of docs/extend.md, one file and no edit of the core."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.algorithms import ADVANTAGES
from tandem.columns.proto import DataProto
from tandem.roles.advantages import token_rewards
from tandem.stages.registry import STAGES
from tandem.stages.stage import BatchStage
from tests.docs.snippets import read_snippets
from tests.e2e.seven import Run, equal, train
from tests.modes.gates import EventLog, SlowEngine, with_engine
from tests.modes.test_event_order import LAST, STEPS, hybrid, run

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
COLOCATE = "{mode: colocate}"
STREAMING = {
    "hybrid": "{mode: hybrid, max_staleness: 0, num_iters_per_train_update: 4}",
    "fully_async": "{mode: fully_async, max_staleness: 0, num_iters_per_train_update: 4}",
}


@pytest.fixture(scope="module")
def words(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """What a user writes to have the stage of the page: it rewards the steps that end with a 3."""
    (snippet,) = (one for one in read_snippets(PAGE, PAGE.name) if one.file == "lab_stages.py")
    folder = tmp_path_factory.mktemp("lab")
    (folder / "lab_stages.py").write_text(snippet.text)
    patch, before = pytest.MonkeyPatch(), dict(STAGES._entries)
    patch.syspath_prepend(folder)
    judge = {"type": "process_reward", "path": str(task.parent / "model"), "end": "3", "good": "7", "bad": "0"}
    yield (
        "plugins=[lab_stages]",
        f"algorithm.stages={json.dumps([judge])}",
        "algorithm.adv_estimator={type: reinforce_plus_plus, gamma: 0.9}",
        "data.train_batch_size=4",
        "trainer.total_steps=2",
        "trainer.exact=true",
    )
    patch.undo()
    sys.modules.pop("lab_stages", None)
    STAGES._entries.clear()
    STAGES._entries.update(before)


@pytest.fixture(scope="module")
def colocated(task: Path, words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The synchronous run."""
    return train(task, f"trainer.output_dir={tmp_path_factory.mktemp('colocate')}", f"execution={COLOCATE}", *words)


def last_batch(run: Run) -> DataProto:
    assert run.session.progress.trained is not None
    return run.session.progress.trained[0]


def check_columns(run: Run) -> None:
    """What was done is what was planned, and the time of the stage is told."""
    plan, batch = run.session.plan, last_batch(run)
    planned = {*plan.source_columns, *(column for stage in plan.stages for column in stage.gives)}
    assert {*batch.columns, *batch.non_tensor_batch} == planned
    assert all(row["time/process_reward"] > 0 for row in run.rows)
    assert all(row["reward/tokens"] > 0 for row in run.rows)


def test_it_is_done_as_planned_before_the_advantages(colocated: Run) -> None:
    planned = [stage.name for stage in colocated.session.plan.stages]
    assert planned == ["rollout", "reward", "process_reward", "advantages", "train", "publish"]
    assert colocated.session.progress.executed == planned
    check_columns(colocated)


def test_the_estimator_sees_its_rewards_and_that_of_the_answer(colocated: Run) -> None:
    batch = last_batch(colocated)
    mask, given = batch.padded("response_mask", False).bool(), batch.padded("token_rewards")
    end = colocated.session.composite.tokenizer.convert_tokens_to_ids("3")
    assert torch.equal(given > 0, batch.padded("responses") == end)
    both = given + token_rewards(batch.dense("rewards"), mask)
    advantages, returns = ADVANTAGES["reinforce_plus_plus"].target(both, mask, gamma=0.9)
    assert torch.equal(batch.padded("advantages"), advantages)
    assert torch.equal(batch.padded("returns"), returns)
    assert bool((returns[:, 0] != returns[:, 1]).any())


@pytest.mark.parametrize("mode", STREAMING)
def test_streaming_modes_do_the_same_bit_by_bit(
    task: Path, tmp_path: Path, words: tuple[str, ...], colocated: Run, mode: str
) -> None:
    run = train(task, f"trainer.output_dir={tmp_path}", f"execution={STREAMING[mode]}", *words)
    check_columns(run)
    assert run.column("reward/tokens") == colocated.column("reward/tokens")
    assert equal(run.weights, colocated.weights)


def test_gae_takes_it_too(task: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    estimator = ("algorithm.adv_estimator={type: gae, lam: 0.9}", "critic.enable=true")
    run = train(task, f"trainer.output_dir={tmp_path}", *words, *estimator)
    batch = last_batch(run)
    mask = batch.padded("response_mask", False).bool()
    both = batch.padded("token_rewards") + token_rewards(batch.dense("rewards"), mask)
    advantages, _ = ADVANTAGES["gae"].target(both, mask, batch.padded("values"), lam=0.9)
    assert torch.equal(batch.padded("advantages"), advantages)


@pytest.mark.parametrize("mode", STREAMING)
def test_it_begins_before_the_last_group_is_finished(
    task: Path, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The last group of each partition is held back until some of the others were judged."""
    log, call = EventLog(), BatchStage.__call__
    judged: list[int] = []

    def noted(self: BatchStage, batch: DataProto) -> DataProto:
        if self.name == "process_reward":
            judged.append(len(batch))
            log.note(f"judged {(len(judged) - 1) // 4}")
        return call(self, batch)

    monkeypatch.setattr(BatchStage, "__call__", noted)
    session = hybrid(task, tmp_path, *words, f"trainer.total_steps={STEPS}", mode=mode)
    with_engine(session, SlowEngine(log, may_end=lambda t: t.place != LAST or log.happened(f"judged {t.partition}")))
    run(session)
    assert judged == [8] * 4 * STEPS  # a group at a time, 4 groups a step
    assert all(log.before(f"judged {k}", f"group {k}.{LAST}") for k in range(STEPS))
