"""The parts of a run on preferences, built only from its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tandem.base.errors import DataError
from tandem.columns.proto import DataProto
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.data.preferences import PreferenceSource
from tandem.models.numerics import prepare_process
from tandem.observe.progress import shows_start
from tandem.observe.run_log import RunLog
from tandem.plan.plan import Plan, check_counted
from tandem.plan.resumed import settings_of
from tandem.roles.actor import Actor
from tandem.roles.preferences import Against, PreferenceEvaluator, Scorer, with_reference_point
from tandem.runtime.build.composite import build_actor, load_trainable, model_tokenizer
from tandem.runtime.build.engine_specs import run_device
from tandem.runtime.build.sources import held_out_preferences, preference_source, prompt_tables
from tandem.session.keep.exports import Exporter
from tandem.session.learning import Learning, why_idle_batch
from tandem.session.progress import Progress, StepPart
from tandem.session.resume import check_inputs, continue_from, find_checkpoint, run_info
from tandem.session.run import Run
from tandem.session.stage_table import StageTable
from tandem.stages.stage import BatchStage, Roles
from tandem.stages.table import bind
from tandem.train.preference import PreferenceObjective


@dataclass(frozen=True)
class PreferenceSession:
    """The parts of a run on preferences; see ``Session``. ``prompts`` of them make a step."""

    plan: Plan
    run: Run
    source: PreferenceSource
    prompts: int
    stages: StageTable
    actor: Actor
    objective: PreferenceObjective
    evaluator: PreferenceEvaluator | None


class Given(StepPart):
    """The answers that a step was given."""

    def __init__(self, source: PreferenceSource, prompts: int) -> None:
        self._source, self._prompts = source, prompts

    def metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        return {
            "length/mean": float(batch.ragged("responses").lengths.double().mean()),
            "length/prompt": float(batch.ragged("prompts").lengths.double().mean()),
        }

    def facts(self, step: int) -> dict[str, Any]:
        return {"prompts": self._prompts, "data": self._source.state_dict()}


@shows_start
def build_preference_session(config: Config, plan: Plan) -> PreferenceSession:
    """Read the preferences, then load the model: what is wrong with the data costs seconds.

    Raises ``ConfigError`` where the plan has problems or names what can't run yet, ``DataError`` for bad rows.
    """
    plan.require_runnable()
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    check_inputs(config)
    resumed = find_checkpoint(config.trainer)
    tokenizer = model_tokenizer(config.actor_rollout_ref.model, config.data)
    tables = prompt_tables(config)
    source = preference_source(config, tokenizer, tables)
    evaluated = config.evaluation.during_run
    held_out = held_out_preferences(config, tokenizer, tables) if evaluated else []
    if evaluated and not held_out:
        raise DataError(
            "an evaluation is asked for, and there are no held-out preferences: name data.val_files, or turn it off"
        )
    size = config.data.train_batch_size
    progress = Progress(0, source.total_steps(size, config.trainer.total_steps))
    check_counted(config, plan, progress.last)
    if resumed is not None:
        continue_from(progress, source, size, resumed)
    model = load_trainable(config.actor_rollout_ref.model, tokenizer, config.trainer.seed)
    actor = build_actor(config, plan, model, progress.last * plan.batch.optimizer_steps, run_device(config.runtime))
    if resumed is not None:
        actor.load(resumed)
    stages, loss = preference_stages(plan, actor), config.algorithm.policy_loss
    objective = PreferenceObjective(loss.type, loss.parameters)
    evaluator = PreferenceEvaluator(held_out, actor, stages, objective) if held_out else None
    info = run_info(config.trainer, config, progress.last, resumed)
    log = RunLog(info, config.trainer.logger, trace=config.trainer.trace)

    def look() -> dict[str, float]:
        if evaluator is None:
            return {}
        with log.timed("evaluation"):
            return evaluator.metrics()

    if resumed is not None:
        resumed.restore_random_state()  # last: what was built here has drawn
    run = Run(
        config.trainer,
        log,
        progress,
        info.output_dir,
        Exporter(config.actor_rollout_ref.model, config.trainer, model, tokenizer, actor.export),
        actor.save,
        parts=(Learning(actor, progress), Given(source, size)),
        interval=config.evaluation.interval,
        at_start=config.evaluation.at_start,
        look=look,
        why_idle=partial(why_idle_batch, masks_overlong=config.algorithm.overlong == "mask"),
        awake=actor.wake,
        settings=settings_of(config, plan.batch.optimizer_steps_of(progress.last)),
    )
    return PreferenceSession(plan, run, source, size, StageTable(stages, run.executing), actor, objective, evaluator)


def held_out_evaluator(config: Config, plan: Plan, trained: ModelConfig) -> PreferenceEvaluator:
    """Return the evaluation of the model ``trained``; the reference is the config's own.

    Raises ``DataError`` where the config names no held-out preferences.
    """
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    start = config.actor_rollout_ref.model
    tokenizer = model_tokenizer(start, config.data)
    held_out = held_out_preferences(config, tokenizer, prompt_tables(config))
    if not held_out:
        raise DataError("nothing to evaluate on: name data.val_files, or a data.source with a get_val_dataset()")
    alone = replace(plan, tags=("actor",), base_tags=())
    models = (load_trainable(model, tokenizer, config.trainer.seed) for model in (trained, start))
    device = run_device(config.runtime)
    scorer = Against(*(build_actor(config, alone, model, 1, device) for model in models))
    loss = config.algorithm.policy_loss
    objective = PreferenceObjective(loss.type, loss.parameters)
    stages = preference_stages(plan, scorer)
    return PreferenceEvaluator(held_out, scorer, stages, objective)


def preference_stages(plan: Plan, actor: Scorer) -> tuple[BatchStage, ...]:
    """Return what the plan puts before the train call, ready to run."""
    point = partial(with_reference_point, actor=actor)
    roles = Roles(plan.step.config, plan.step, ref_logprobs=actor.ref_logprobs, reference_point=point)
    return bind(plan.stages, plan.table, roles)
