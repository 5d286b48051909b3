"""The parts of a session that are the same in every mode, around those that a mode brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from tandem.dataflow.partition import Order
from tandem.dataflow.store import DataPlane
from tandem.observe.run_log import RunLog
from tandem.plan.parts.critic import critic_model
from tandem.plan.resumed import settings_of
from tandem.roles.advantages import AdvantageReport
from tandem.session.build.parts import Parts
from tandem.session.keep.exports import export_precision
from tandem.session.learning import Criticism, Estimates, Learning, Speed, why_idle_batch
from tandem.session.progress import StepPart
from tandem.session.run import Run
from tandem.session.samples import NOTHING, Samples, Scored, accounts_before
from tandem.session.stage_table import StageTable
from tandem.session.waits import Waits
from tandem.session.weights import PushedWeights, SharedWeights
from tandem.speed.measured import setting_of
from tandem.stages.stage import BatchStage

K = TypeVar("K")
R = TypeVar("R", bound=Scored)


@dataclass(frozen=True)
class OfMode(Generic[R]):
    """What a mode brings. ``parts`` of it are asked before all others.

    ``evaluating`` is the context of an evaluation, ``counting`` that of a step. A partition comes in ``sub_batches``
    parts in this ``order``, with ``columns`` beside those of generation and scoring, at most ``staleness`` versions
    old; it is filled ``beside`` the loop, or by it. ``stages`` are those that the actor's loop runs (None: all),
    ``advantage_report`` is what the advantages report of a partition (None: what they reported last).
    """

    rollout: R
    weights: SharedWeights | PushedWeights
    plane: DataPlane
    waits: Waits
    log: RunLog
    parts: Sequence[StepPart]
    evaluating: Callable[[], AbstractContextManager[None]]
    counting: Callable[[], AbstractContextManager[None]] = nullcontext
    sub_batches: int = 1
    order: Order = "arrival"
    columns: Sequence[str] = ()
    staleness: int = 0
    beside: bool = False
    stages: Sequence[BatchStage] | None = None
    advantage_report: Callable[[int], AdvantageReport] | None = None


def assemble(parts: Parts, kind: Callable[..., K], own: OfMode[Any], **handles: Any) -> K:
    """Build a session of this ``kind``."""
    samples, composite = _samples(parts, own), parts.composite
    evaluator = parts.evaluator()

    def look() -> dict[str, float]:
        if evaluator is None:
            return {}
        with own.log.timed("evaluation"), own.evaluating():
            answers = evaluator.answers()
        own.log.keep_samples("eval", parts.progress.step, evaluator.answered())
        return evaluator.metrics(answers)

    run = _run(parts, own, samples, look)
    return kind(
        config=parts.config,
        plan=parts.plan,
        run=run,
        rollout=own.rollout,
        samples=samples,
        stages=StageTable(composite.stages if own.stages is None else own.stages, run.executing),
        weights=own.weights,
        composite=composite,
        rewards=parts.rewards,
        evaluator=evaluator,
        plane=own.plane,
        source=parts.source,
        **handles,
    )


def _samples(parts: Parts, own: OfMode[Any]) -> Samples:
    config = parts.config
    return Samples(
        own.plane,
        parts.source,
        own.rollout,
        own.waits,
        own.log,
        parts.progress,
        parts.composite.tokenizer,
        columns=list(dict.fromkeys([*parts.plan.group_columns, *own.columns])),
        prompts=config.data.train_batch_size,
        sub_batches=own.sub_batches,
        order=own.order,
        max_staleness=own.staleness,
        beside=own.beside,
        recorded=config.trainer.rollouts_per_step,
        before=NOTHING if parts.resumed is None else accounts_before(parts.resumed.read()),
    )


def _run(parts: Parts, own: OfMode[Any], samples: Samples, look: Callable[[], dict[str, float]]) -> Run:
    config, composite, progress = parts.config, parts.composite, parts.progress
    advantages, critic = composite.advantages, composite.critic
    report = (lambda step: advantages.report()) if own.advantage_report is None else own.advantage_report
    correction = None if parts.plan.old_logprobs == "rollout" else config.algorithm.correction
    speed = Speed(setting_of(config), progress, parts.output_dir)
    precision = export_precision(config.trainer, critic_model(config))
    return Run(
        config.trainer,
        own.log,
        progress,
        parts.output_dir,
        parts.exporter(),
        composite.actor.save,
        parts=(
            speed,
            *own.parts,
            samples,
            Learning(composite.actor, progress),
            Estimates(report, correction),
            *(() if critic is None else (Criticism(critic, composite.tokenizer, precision),)),
        ),
        interval=config.evaluation.interval,
        at_start=config.evaluation.at_start,
        look=look,
        limits=speed.limits,
        counting=own.counting,
        why_idle=partial(why_idle_batch, masks_overlong=config.algorithm.overlong == "mask"),
        untrained=parts.plan.batch.untrained_steps,
        awake=composite.actor.wake,
        closing=parts.closing,
        settings=settings_of(config, parts.plan.batch.optimizer_steps_of(progress.last)),
    )
