"""The live handles of preference training, built only from its plan, and what happens around each step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.columns.proto import DataProto
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.data.preferences import PreferenceSource
from tandem.models.causal_lm import CausalLM
from tandem.models.numerics import prepare_process
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.plan.plan import Plan
from tandem.roles.actor import Actor
from tandem.roles.loss import Loss
from tandem.roles.preferences import Against, PreferenceEvaluator, Scorer, as_groups, with_reference_point
from tandem.runtime.build.composite import build_actor, load_trainable, model_tokenizer
from tandem.runtime.build.sources import held_out_preferences, preference_source, prompt_tables
from tandem.session.build import continue_from, find_checkpoint
from tandem.session.exports import Exporter
from tandem.session.stepping import CHECKPOINTS, Progress, Stepping
from tandem.stages.stage import BatchStage, Roles
from tandem.stages.table import bind
from tandem.train import checkpoint
from tandem.train.preference import PreferenceObjective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreferenceSession(Stepping):
    """Everything that the loop needs. ``stages`` are the planned ones before the train call."""

    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    trained: Actor
    stages: tuple[BatchStage, ...]
    objective: PreferenceObjective
    evaluator: PreferenceEvaluator | None
    source: PreferenceSource

    @property
    def actor(self) -> Actor:
        """The role that is trained."""
        return self.trained

    def draw(self) -> DataProto:
        """The next P preferences, each a group of its answers."""
        return as_groups(self.source.take(self.config.data.train_batch_size))

    def train(self, batch: DataProto) -> dict[str, float]:
        """The train call on a complete batch."""
        return self.actor.step(Loss(batch, self.objective))

    def _metrics(self, batch: DataProto, step: int) -> dict[str, float]:
        return {
            "length/mean": float(batch.ragged("responses").lengths.double().mean()),
            "length/prompt": float(batch.ragged("prompts").lengths.double().mean()),
        }

    def _evaluation(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        with self.log.timed("evaluation"):
            return self.evaluator.metrics()

    def save(self, step: int) -> None:
        """Write a checkpoint to resume from, with what the run exports inside."""
        with self.log.timed("save"):
            root, prompts = self.output_dir / CHECKPOINTS, self.config.data.train_batch_size
            facts: dict[str, Any] = {"step": step, "prompts": prompts, "data": self.source.state_dict()}
            keep, parts = self.config.trainer.keep_checkpoints, self.exporter.write_parts(root)
            self.actor.save(root, step, facts=facts, keep=keep, parts=parts)

    @property
    def exporter(self) -> Exporter:
        """Writes what the actor has learned."""
        section = self.config.actor_rollout_ref.model
        return Exporter(section, self.config.trainer, self.model, self.tokenizer, self.actor.export)


def build_preference_session(config: Config, plan: Plan) -> PreferenceSession:
    """Read the preferences, then load the model: what is wrong with the data costs seconds.

    Raises ``ConfigError`` where the plan has problems or names what can't run yet, ``DataError`` for bad rows.
    """
    plan.require_runnable()
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    resumed = find_checkpoint(config)
    tokenizer = model_tokenizer(config.actor_rollout_ref.model)
    tables = prompt_tables(config)
    source = preference_source(config, tokenizer, tables)
    evaluated = config.evaluation.interval > 0 or config.evaluation.at_start
    held_out = held_out_preferences(config, tokenizer, tables) if evaluated else []
    if evaluated and not held_out:
        raise DataError(
            "an evaluation is asked for, and there are no held-out preferences: name data.val_files, or turn it off"
        )
    size = config.data.train_batch_size
    progress = Progress(0, source.total_steps(size, config.trainer.total_steps))
    if resumed is not None:
        continue_from(progress, source, size, resumed)
    model = load_trainable(config.actor_rollout_ref.model, tokenizer, config.trainer.seed)
    actor = build_actor(config, plan, model, progress.last * plan.batch.optimizer_steps)
    if resumed is not None:
        actor.load(resumed)
    stages, loss = preference_stages(plan, actor), config.algorithm.policy_loss
    objective = PreferenceObjective(loss.type, loss.parameters)
    output_dir = Path(config.trainer.output_dir)
    checkpoint.set_aside(output_dir / CHECKPOINTS, progress.step)
    document = config.model_dump(mode="json", by_alias=True)
    info = RunInfo(output_dir, progress.last, progress.step if progress.step else None, document)
    return PreferenceSession(
        config=config,
        plan=plan,
        model=model,
        tokenizer=tokenizer,
        trained=actor,
        stages=stages,
        objective=objective,
        evaluator=PreferenceEvaluator(held_out, actor, stages, objective) if held_out else None,
        source=source,
        log=RunLog(info, config.trainer.logger, trace=config.trainer.trace),
        progress=progress,
        output_dir=output_dir,
        closing=ExitStack(),
    )


def held_out_evaluator(config: Config, plan: Plan, trained: ModelConfig) -> PreferenceEvaluator:
    """The evaluation of the model ``trained``; the reference is the config's own.

    Raises ``DataError`` where the config names no held-out preferences.
    """
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    start = config.actor_rollout_ref.model
    tokenizer = model_tokenizer(start)
    held_out = held_out_preferences(config, tokenizer, prompt_tables(config))
    if not held_out:
        raise DataError("nothing to evaluate on: name data.val_files, or a data.source with a get_val_dataset()")
    alone = replace(plan, tags=("actor",), base_tags=())
    models = (load_trainable(model, tokenizer, config.trainer.seed) for model in (trained, start))
    scorer = Against(*(build_actor(config, alone, model, 1) for model in models))
    loss = config.algorithm.policy_loss
    objective = PreferenceObjective(loss.type, loss.parameters)
    stages = preference_stages(plan, scorer)
    return PreferenceEvaluator(held_out, scorer, stages, objective)


def preference_stages(plan: Plan, actor: Scorer) -> tuple[BatchStage, ...]:
    """What the plan puts before the train call, ready to run."""
    point = partial(with_reference_point, actor=actor)
    roles = Roles(plan.step.config, plan.step, ref_logprobs=actor.ref_logprobs, reference_point=point)
    return bind(plan.stages, plan.table, roles)
