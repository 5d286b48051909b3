"""The colocate loop over fakes: the order of things, without a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import RewardError
from tandem.columns.proto import DataProto
from tandem.config.schema import Config
from tandem.control.colocate import train_colocate
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import Plan, compile_plan
from tandem.reward.outcome import Verdict, failed
from tandem.roles.actor import Actor
from tandem.roles.advantages import AdvantageStage
from tandem.roles.batching import Batching
from tandem.roles.train_group import TrainGroup
from tandem.session.build.assemble import OfMode, assemble
from tandem.session.build.parts import Parts
from tandem.session.progress import Progress
from tandem.session.rollout import SharedRollout, TimeSharing
from tandem.session.session import Session, TimeShared
from tandem.session.weights import SharedWeights
from tandem.stages.stage import BatchStage
from tests.roles.fake_roles import FakeTokenizer, Rig, rig
from tests.roles.fake_training import FakeTrainEngine, SamplesObjective

TREE: dict[str, Any] = {
    "actor_rollout_ref": {"model": {"path": "nowhere"}, "rollout": {"n": 3}, "ref": {"update_interval": 2}},
    "algorithm": {"kl": {"in": "loss", "coef": 0.1}},
    "data": {"train_batch_size": 4},
    "trainer": {"total_steps": 3, "logger": []},
}


@dataclass
class FakeComposite:
    """What the session asks of the composite node."""

    actor: Actor
    engine: Any
    advantages: AdvantageStage
    stages: tuple[BatchStage, ...]
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    objective: SamplesObjective = field(default_factory=SamplesObjective)
    critic: None = None
    model: None = None


class Loop:
    """A session of fakes, and everything that happens to engine and trainer in one list."""

    def __init__(self, output: Path, *, made: Rig | None = None, trainer: FakeTrainEngine | None = None) -> None:
        config = Config.model_validate({**TREE, "trainer": {**TREE["trainer"], "output_dir": str(output)}})
        self.plan: Plan = compile_plan(config)
        self.made = rig() if made is None else made
        self.trainer = FakeTrainEngine() if trainer is None else trainer
        self.events: list[str] = []
        self.made.engine.calls = self.trainer.calls = self.events
        ranks = TrainGroup.in_process(self.trainer, deadline_s=10)  # type: ignore[arg-type]
        actor = Actor(ranks, Batching(4, 1, 0), keep_reference=True, refresh_every=2)
        advantages = AdvantageStage.of(config.algorithm)
        runs: dict[str, Callable[[DataProto], DataProto]] = {"ref": actor.ref_logprobs, "advantages": advantages}
        planned = [stage for stage in self.plan.stages if stage.name in runs]
        stages = tuple(
            BatchStage(stage.name, stage.needs, stage.gives, runs[stage.name], stage.phase) for stage in planned
        )
        composite: Any = FakeComposite(actor, self.made.engine, advantages, stages)
        filler: Any = self.made.rollout
        nowhere: Any = None
        parts = Parts(
            config, self.plan, nowhere, composite, filler._source, [], filler._rewards, Progress(0, 3), ExitStack()
        )
        log = parts.open_log()
        rollout = SharedRollout(filler, TimeSharing(actor, composite.engine, log), filler._rewards)
        weights = SharedWeights(actor, composite.engine, filler)
        own = OfMode(rollout, weights, self.made.plane, parts.waits(), log, [rollout], evaluating=nullcontext)
        self.session: Session[TimeShared] = assemble(parts, Session, own)

    def run(self) -> None:
        with self.session.run.log:
            train_colocate(self.session)


def test_a_step_is_what_the_plan_says_in_turns_on_the_devices(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.run()
    assert loop.session.run.progress.executed == [stage.name for stage in loop.plan.stages]
    step = ["sleep", "wake", "generate", "sleep", "wake", "forward", "forward_backward", "optim_step"]
    assert loop.events == ["load 0", *step, "load 1", *step, "load 2", *step, "load 3"]


def test_every_partition_is_trained_once_and_samples_are_conserved(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.run()
    accounts = loop.made.plane.status().accounts
    accounts.check()
    assert (accounts.trained, accounts.queued, accounts.dropped) == (36, 0, {})
    assert [len(batch) for batch in loop.trainer.trained] == [12, 12, 12]
    rows = read_rows(tmp_path / METRICS_FILE)
    assert [(row["step"], row["version"], row["updates"]) for row in rows] == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


def test_b22_a_step_that_is_skipped_is_published_under_its_number(tmp_path: Path) -> None:
    loop = Loop(tmp_path, trainer=FakeTrainEngine(skip=[2]))
    loop.run()
    rows = read_rows(tmp_path / METRICS_FILE)
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert [row["updates"] for row in rows] == [1, 1, 2]
    assert [row["optim/skipped_steps"] for row in rows] == [0, 1, 1]
    assert loop.made.gate.published == 3
    assert float(loop.trainer.weight) == 2


def test_the_reference_is_refreshed_when_it_is_due(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    seen: list[float] = []
    ref = loop.session.composite.actor.ref_logprobs

    def watched(batch: DataProto) -> DataProto:
        result = ref(batch)
        seen.append(-float(result.ragged("ref_logprobs").values[0]))
        return result

    stages = tuple(
        replace(stage, run=watched) if stage.name == "ref" else stage for stage in loop.session.stages.stages
    )
    loop.session.stages.stages = stages
    loop.run()
    assert seen == [0.0, 0.0, 2.0]  # the weights after two steps


def test_a_step_that_cannot_be_scored_ends_the_loop_with_the_record_of_those_before(tmp_path: Path) -> None:
    made = rig()
    good = made.scoring.judge
    made.scoring.judge = lambda group, i: good(group, i) if len(made.scoring.labels) <= 4 else failed("the judge left")
    loop = Loop(tmp_path, made=made)
    with pytest.raises(RewardError, match=r"step 2 .*the judge left"):
        loop.run()
    assert [row["step"] for row in read_rows(tmp_path / METRICS_FILE)] == [1]
    assert "the judge left" in (tmp_path / "report.html").read_text()


def test_failed_scorings_are_told_with_count_and_text_and_the_share_scored_beside_the_mean(tmp_path: Path) -> None:
    """Else a scorer that fails on the wrong answers makes a perfect mean of the right ones."""
    made = rig()
    made.scoring.judge = lambda group, i: Verdict(1.0) if i else failed("KeyError: 'answer' (scorer.py:7)")
    loop = Loop(tmp_path, made=made)
    loop.run()
    rows = read_rows(tmp_path / METRICS_FILE)
    assert [row["reward/mean"] for row in rows] == [1.0] * len(rows)
    assert [row["reward/scored_share"] for row in rows] == [pytest.approx(2 / 3)] * len(rows)
    told = loop.session.run.summary()["rewards"]
    assert told == f"{8 * len(rows)} of {12 * len(rows)} answers scored, {4 * len(rows)} without a reward: " + (
        f"{4 * len(rows)} x KeyError: 'answer' (scorer.py:7)"
    )
    report = (tmp_path / "report.html").read_text()
    assert "answers scored" in report and "67%" in report
