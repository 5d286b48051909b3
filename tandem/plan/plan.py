"""``compile_plan``: everything that follows from a config, and every contradiction in it, before anything starts.

Pure: it reads the config, the registries, and the first bytes of the files that the config names. No torch, no Ray,
no devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Literal

from tandem.base.errors import ConfigError, Problem
from tandem.config.schema import Config
from tandem.models.families import notes_on_families
from tandem.plan.checks.engine import check_engine, engine_notes
from tandem.plan.checks.learning.algorithm import check_algorithm
from tandem.plan.checks.learning.correction import correction_notes
from tandem.plan.checks.learning.critic import check_critic, check_critic_schedule, read_critic
from tandem.plan.checks.learning.preference import check_preferences
from tandem.plan.checks.learning.stages import check_stages
from tandem.plan.checks.learning.teacher import check_teacher, notes_on_teacher
from tandem.plan.checks.model.adapters import check_adapters, check_exported, check_pushed, notes_on_targets
from tandem.plan.checks.model.experts import check_experts
from tandem.plan.checks.model.folder import check_ends, check_files_of, check_nucleus, check_template, notes_on_ends
from tandem.plan.checks.model.images import check_images, shows_images
from tandem.plan.checks.model.megatron import check_megatron
from tandem.plan.checks.model.model import check_context, check_exact, exact_notes, read_checked
from tandem.plan.checks.model.split import check_split, check_traffic
from tandem.plan.checks.model.template import check_arguments, notes_on_template
from tandem.plan.checks.run.execution import check_execution
from tandem.plan.checks.run.resumed import check_resumed, resume_notes
from tandem.plan.checks.run.run_folder import Saved, find_resumed
from tandem.plan.checks.run.trainer import (
    check_evaluation,
    check_hidden,
    check_kept,
    check_length,
    check_schedule,
    check_trainer,
    metrics_to_keep_by,
    notes_on_rows,
)
from tandem.plan.checks.samples.data import check_data, notes_on_files
from tandem.plan.checks.samples.episode import check_episode
from tandem.plan.checks.samples.reward import check_reward
from tandem.plan.files.folder import describes_alone
from tandem.plan.files.model import ModelFacts
from tandem.plan.files.rows import trained_rows
from tandem.plan.kv import check_kv, notes_on_kv
from tandem.plan.later import what_comes_later
from tandem.plan.memory import MemoryPlan, notes_on_memory, plan_memory
from tandem.plan.parts.adapters import pushed_part
from tandem.plan.parts.batch import BatchPlan, plan_batch
from tandem.plan.parts.critic import CriticPlan, plan_critic
from tandem.plan.parts.dispatch import begins_longest_first
from tandem.plan.parts.engine import shares_weights
from tandem.plan.parts.entries import Entries, import_plugins, look_up, unknown_names
from tandem.plan.parts.flow import Flow, plan_flow
from tandem.plan.parts.placement import (
    Placement,
    choose_runtime,
    device_groups,
    placements,
    train_ranks,
    uses_reference,
)
from tandem.plan.parts.preference import learns_preferences
from tandem.plan.parts.stages import (
    old_logprobs_from,
    plan_base_tags,
    plan_tags,
    source_columns,
    step_facts,
)
from tandem.plan.parts.teacher import Teacher, teachers
from tandem.plan.parts.transport import Transport, check_transport, plan_transport
from tandem.plan.reads.form import unread
from tandem.plan.reads.train import READS, Setting
from tandem.plan.reward import ScoringPlan, plan_scoring, reward_notes
from tandem.plan.swap import check_swap
from tandem.stages.facts import REWARD, OldLogprobs, Step
from tandem.stages.stage import PlannedStage, Stage
from tandem.stages.table import BUILT_IN, plan_step

PREFERENCE = "preference"
"""The loop of preference training."""

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"

Pushed = Literal["nothing", "merged", "adapter"]


@dataclass(frozen=True)
class Plan:
    """What will run where, when, on how much; ``problems`` is empty in a plan that may start.

    ``device_groups`` are devices per group; what a run needs is their sum. ``base_tags`` are those of the ``tags`` that
    are no copies but the base model, its adapters switched off. ``pushed`` is what new weights for the rollout engine
    are: nothing where it generates with the actor's own; ``transport`` says how they travel. ``flow`` is what the mode
    comes to; ``longest_first``: prompts are begun in the order of their expected lengths. ``later`` names what can be
    planned and not be run yet. ``notes`` are harmless facts worth knowing. ``memory`` is empty where the model's sizes
    are unknown. ``batch.steps`` counts the rows of the files without what is held out, before any other is dropped.
    ``scoring`` is None where no reward is made. ``stages`` are those of ``table`` that run, by what ``step`` says of
    the config.
    """

    mode: str
    runtime: str
    placements: tuple[Placement, ...]
    device_groups: dict[str, int]
    tags: tuple[str, ...]
    base_tags: tuple[str, ...]
    teachers: tuple[Teacher, ...]
    scoring: ScoringPlan | None
    old_logprobs: OldLogprobs
    pushed: Pushed
    transport: Transport
    flow: Flow
    longest_first: bool
    source_columns: tuple[str, ...]
    stages: tuple[PlannedStage, ...]
    step: Step = field(compare=False, repr=False)
    table: tuple[Stage, ...] = field(compare=False, repr=False)
    batch: BatchPlan
    critic: CriticPlan | None
    memory: tuple[MemoryPlan, ...]
    later: tuple[Problem, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of the deployed roles."""
        return tuple(placement.role for placement in self.placements)

    @property
    def generates(self) -> bool:
        """Whether answers are sampled and scored; else they are given."""
        return self.step.generates

    @property
    def loop(self) -> str:
        """The loop that runs it: that of its mode, whole or pipelined, or the one for preferences."""
        if not self.generates:
            return PREFERENCE
        return self.mode if self.flow.pipelining == "off" else f"{self.mode}_pipelined"

    @property
    def group_columns(self) -> tuple[str, ...]:
        """The columns that a group has once it is generated and scored."""
        made = (name for stage in self.stages if stage.phase == "group" for name in stage.gives)
        return tuple(dict.fromkeys([*self.source_columns, *made]))

    @property
    def devices(self) -> int:
        """Devices that the run needs: separate groups need the sum."""
        return sum(self.device_groups.values())

    @property
    def runs(self) -> bool:
        """Whether a run may start here."""
        return not (self.problems or self.later)

    def to_json(self) -> str:
        """Return the whole plan for machines; values that JSON lacks are written as text."""
        decided = {one.name: getattr(self, one.name) for one in fields(self) if one.repr}
        content = {"kind": "train", "loop": self.loop, "roles": self.roles, "devices": self.devices, **decided}
        return json.dumps(content, default=_plain, ensure_ascii=False, indent=2)

    def require_runnable(self) -> None:
        """Raise ``ConfigError`` with all problems and with what can't be run yet, if there are any."""
        if not self.runs:
            raise ConfigError([*self.problems, *self.later])


def _plain(value: object) -> object:
    """Return what JSON can say of a value that it lacks."""
    if isinstance(value, Problem):
        value = value.hidden()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else repr(value)


def compile_plan(config: Config, *, own_loop: bool = False) -> Plan:
    """Return the plan of a training run, with every contradiction found in ``problems``. Deterministic.

    ``own_loop``: the user's own code runs it, and nobody counts its steps. Importing the plugins is the only side
    effect.
    """
    plugin_problems = import_plugins(config)
    entries = look_up(config)
    placed = placements(config)
    facts, model_problems = read_checked(MODEL, config.actor_rollout_ref.model, sees=True)
    critic_facts, critic_problems = read_critic(config, facts)
    rows = trained_rows(config)
    batch = plan_batch(config, train_ranks(config), rows.kept)
    saved, resume_problems = find_resumed(config.trainer)
    stages = plan_step(step := step_facts(config, entries), entries.stages)
    tags, base_tags, runtime = plan_tags(config), plan_base_tags(config), choose_runtime(config, placed)
    shares, copies = shares_weights(config, runtime), len(tags) - len(base_tags) - 1
    found = [
        *plugin_problems,
        *unknown_names(config),
        *model_problems,
        *critic_problems,
        *_contradictions(config, entries, placed, facts),
        *([] if learns_preferences(config) else check_engine(config, entries, runtime)),
        *_sending_problems(config, entries, runtime, shares, own_loop),
        *check_images(config, facts),
        *check_critic(config, batch, critic_facts, own_loop),
        *check_length(config, batch, rows),
        *resume_problems,
        *([] if saved is None or own_loop else check_resumed(config, saved, batch.steps)),
        *check_schedule(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, batch.optimizer_steps_in_all, own_loop),
    ]
    memory = plan_memory(config, facts, placed, copies=copies, shares=shares, critic=critic_facts)
    ignored, noted = unread(config, READS, Setting(config, entries, runtime, shares), wrong={p.key for p in found})
    before = (*_resume_notes(config, saved, batch), *notes_on_rows(rows, batch))
    return Plan(
        mode=config.execution.mode,
        runtime=runtime,
        placements=placed,
        device_groups=device_groups(placed),
        tags=tags,
        base_tags=base_tags,
        teachers=teachers(config),
        scoring=plan_scoring(config) if any(stage.role == REWARD for stage in stages) else None,
        old_logprobs=old_logprobs_from(config),
        pushed="nothing" if shares else pushed_part(config),
        transport=plan_transport(config, placed),
        flow=plan_flow(config),
        longest_first=begins_longest_first(config, placed),
        source_columns=source_columns(entries, shows_images(config, facts)),
        stages=stages,
        step=step,
        table=(*BUILT_IN, *entries.stages),
        batch=batch,
        critic=plan_critic(config),
        memory=memory,
        later=what_comes_later(config, runtime),
        notes=(*before, *_notes(config, entries, facts, runtime), *noted, *notes_on_memory(config, runtime, memory)),
        problems=tuple({(problem.key, problem.reason): problem for problem in [*found, *ignored]}.values()),
    )


def check_counted(config: Config, plan: Plan, steps: int) -> None:
    """Raise ``ConfigError`` for what can't be in a run of as many ``steps`` as the data that were read give it.

    A plan counts rows before a tokenizer reads them; those that are too long or bad may be dropped.
    """
    batch = replace(plan.batch, steps=steps, optimizer_steps_in_all=plan.batch.optimizer_steps_of(steps))
    optim = config.actor_rollout_ref.actor.optim
    problems = [
        *check_schedule(f"{ACTOR}.optim", optim, batch.optimizer_steps_in_all),
        *(() if plan.critic is None else check_critic_schedule(config, batch, plan.critic.epochs)),
    ]
    if problems:
        raise ConfigError(problems)


def _sending_problems(
    config: Config, entries: Entries, runtime: str, shares: bool, own_loop: bool
) -> Iterator[Problem]:
    """Yield what speaks against how new weights get to engines, and to which."""
    yield from check_pushed(config, shares)
    yield from check_transport(config, shares, own_loop)
    yield from check_swap(config, entries, runtime)


def _contradictions(
    config: Config, entries: Entries, placed: tuple[Placement, ...], facts: ModelFacts | None
) -> Iterator[Problem]:
    yield from check_execution(config, placed)
    if entries.preference_loss is not None:
        yield from check_preferences(config, entries.preference_loss, shows_images(config, facts))
    else:
        yield from check_algorithm(config, entries)
        yield from check_stages(config, entries)
        yield from check_reward(config)
        yield from check_episode(config)
        yield from check_teacher(config, entries, facts)
        yield from check_data(config, shows_images(config, facts))
        yield from check_ends(config, facts)
        yield from check_nucleus(config, facts)
    if facts is not None:
        if not describes_alone(config.actor_rollout_ref.model):
            yield from check_files_of(MODEL, config.actor_rollout_ref.model)
        yield from check_template(config)
    yield from check_arguments(config)
    yield from check_context(config, facts)
    yield from check_kv(config, facts)
    yield from check_adapters(MODEL, config.actor_rollout_ref.model, facts)
    yield from check_split(config, facts)
    yield from check_megatron(config, facts)
    yield from check_experts(config, facts)
    yield from check_traffic(config, placed)
    yield from check_exported(config.trainer, config.actor_rollout_ref.model)
    yield from check_exact(config)
    yield from check_evaluation(config)
    by = metrics_to_keep_by(config) if entries.preference_loss is None else ["eval/accuracy", "eval/loss"]
    yield from check_kept(config.trainer, config.evaluation.interval > 0, by)
    yield from check_trainer(config.trainer, config)
    yield from check_hidden(config)


def _resume_notes(config: Config, saved: Saved | None, batch: BatchPlan) -> Iterator[str]:
    if saved is not None:
        yield from resume_notes(config, saved, batch.optimizer_steps_in_all)


def _notes(config: Config, entries: Entries, facts: ModelFacts | None, runtime: str) -> Iterator[str]:
    kl, interval = config.algorithm.kl, config.evaluation.interval
    yield from engine_notes(config, runtime)
    yield from notes_on_kv(config, facts)
    if kl.where != "off" and kl.coef == 0:
        yield "algorithm.kl.coef is 0: the KL is off, and no reference is computed"
    yield from exact_notes(config)
    if uses_reference(config) and config.actor_rollout_ref.ref.update_interval == 1:
        yield (
            "actor_rollout_ref.ref.update_interval is 1: the reference is the policy at the start of each step, so the "
            "KL is 0 there and holds back only what later mini-batches and epochs of the step add"
        )
    if uses_reference(config) and kl.where == "loss" and entries.kl is not None and entries.kl.traits.get("for_reward"):
        yield (
            f"algorithm.kl.type {kl.type} in the loss has a gradient of mean 0 and holds nothing back; {kl.type}+ "
            "reports the same value and does, as k2 and k3 do"
        )
    if config.trainer.total_steps is not None and interval > config.trainer.total_steps:
        yield f"evaluation.interval = {interval} is beyond the last step: nothing is evaluated on the way"
    if sum(config.execution.resource.get("advantages", (0, 0))) > 1:
        yield "execution.resource.advantages reserves nothing: advantages are computed beside the driver, on no device"
    yield from notes_on_teacher(config)
    yield from notes_on_files(config.data)
    if not learns_preferences(config):
        yield from correction_notes(config, entries)
        yield from notes_on_ends(config)
    yield from reward_notes(config)
    yield from notes_on_template(config)
    yield from notes_on_targets(config.actor_rollout_ref.model, facts)
    if facts is None:
        yield f"{MODEL}.path is no folder here and not in the hub's cache: context and memory are not checked"
    else:
        generates = config.actor_rollout_ref.rollout.name == "hf" and not learns_preferences(config)
        yield from notes_on_families(facts.families, generates=generates)
