"""The live handles of preference training, built only from its plan, and what happens around each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tandem.base.errors import DataError
from tandem.columns.proto import DataProto
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.dataflow.preferences import PreferenceSource
from tandem.models.causal_lm import CausalLM
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.roles.actor import Actor
from tandem.roles.loss import Loss
from tandem.roles.preferences import Against, PreferenceEvaluator, Scorer, as_groups, with_reference_point
from tandem.roles.stages import BatchStage
from tandem.topology.build import continue_from, find_checkpoint
from tandem.topology.composite import build_actor, load_trainable, model_tokenizer
from tandem.topology.exports import Exporter
from tandem.topology.plan import Plan
from tandem.topology.session import CHECKPOINTS, FINAL_FOLDER, Progress
from tandem.topology.sources import held_out_preferences, preference_source, prompt_tables
from tandem.train import checkpoint
from tandem.train.preference import PreferenceObjective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreferenceSession:
    """Everything that the loop needs. ``stages`` are the planned ones before the train call."""

    config: Config
    plan: Plan
    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    actor: Actor
    stages: tuple[BatchStage, ...]
    objective: PreferenceObjective
    evaluator: PreferenceEvaluator | None
    source: PreferenceSource
    log: RunLog
    progress: Progress
    output_dir: Path

    def steps(self) -> Iterator[int]:
        """The steps that are left. Each is timed while the loop works on it, then recorded, evaluated and saved."""
        while self.progress.step < self.progress.last:
            step = self.progress.step
            self.progress.executed = []
            started = time.monotonic()
            with self.log.timed("step"):
                yield step
            self.progress.seconds = time.monotonic() - started
            self._record(step)

    def run(self, stage: str) -> AbstractContextManager[None]:
        """Around a planned stage: timed, and noted as executed."""
        self.progress.executed.append(stage)
        return self.log.timed(stage)

    def draw(self) -> DataProto:
        """The next P preferences, each a group of its answers."""
        return as_groups(self.source.take(self.config.data.train_batch_size))

    def train(self, batch: DataProto) -> dict[str, float]:
        """The train call on a complete batch."""
        return self.actor.step(Loss(batch, self.objective))

    def end_step(self, step: int, batch: DataProto, update: dict[str, float]) -> None:
        """Refresh the reference if it is due, count the step as done."""
        interval = self.config.actor_rollout_ref.ref.update_interval
        if interval is not None and (step + 1) % interval == 0:
            self.actor.refresh_reference()
        self.progress.step = step + 1
        self.progress.trained = batch, update

    def evaluate(self, step: int) -> None:
        """Compare the held-out preferences and log the result as ``step``."""
        self.log.log(step, self._evaluation())

    def _record(self, step: int) -> None:
        """Evaluate the finished step where due and log it, then save where due."""
        assert self.progress.trained is not None
        (batch, update), done = self.progress.trained, step + 1
        last, interval, save = done == self.progress.last, self.config.evaluation.interval, self.config.trainer
        evaluated = self._evaluation() if interval and (done % interval == 0 or last) else {}
        tokens = batch.ragged("responses").lengths
        metrics = {
            "version": float(done),
            "updates": float(self.actor.updates),
            "throughput/tokens_per_second": float(tokens.sum()) / self.progress.seconds,
            "length/mean": float(tokens.double().mean()),
            "length/prompt": float(batch.ragged("prompts").lengths.double().mean()),
            **update,
            **evaluated,
        }
        self.log.log(done, metrics)
        if save.save_interval and (done % save.save_interval == 0 or last):
            self.save(done)

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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a whole run: the model is saved at its end, the report is written whatever happens."""
        started = time.monotonic()
        with self.log:
            try:
                yield
                self.exporter.write(self.output_dir / FINAL_FOLDER)
                self.log.summarize(model=str(self.output_dir / FINAL_FOLDER))
            finally:
                self.log.summarize(seconds=round(time.monotonic() - started, 1), steps=self.progress.step)


def build_preference_session(config: Config, plan: Plan) -> PreferenceSession:
    """Read the preferences, then load the model: what is wrong with the data costs seconds.

    Raises ``ConfigError`` where the plan has problems or names what can't run yet, ``DataError`` for bad rows.
    """
    plan.require_runnable()
    if config.runtime.torch_threads is not None:
        torch.set_num_threads(config.runtime.torch_threads)
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
        actor=actor,
        stages=stages,
        objective=objective,
        evaluator=PreferenceEvaluator(held_out, size, actor, stages, objective) if held_out else None,
        source=source,
        log=RunLog(info, config.trainer.logger, trace=config.trainer.trace),
        progress=progress,
        output_dir=output_dir,
    )


def held_out_evaluator(config: Config, plan: Plan, trained: ModelConfig) -> PreferenceEvaluator:
    """The evaluation of the model ``trained``; the reference is the config's own.

    Raises ``DataError`` where the config names no held-out preferences.
    """
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
    return PreferenceEvaluator(held_out, config.data.train_batch_size, scorer, stages, objective)


def preference_stages(plan: Plan, actor: Scorer) -> tuple[BatchStage, ...]:
    """What the plan puts before the train call, ready to run."""
    runs: dict[str, Callable[[DataProto], DataProto]] = {
        "ref": actor.ref_logprobs,
        "reference_point": partial(with_reference_point, actor=actor),
    }
    planned = [stage for stage in plan.stages if stage.name in runs]
    return tuple(BatchStage(stage.name, stage.needs, stage.gives, runs[stage.name], stage.per) for stage in planned)
