"""The step of a config: the facts that its stages decide by, the stages in order, and the tags that they need."""

from __future__ import annotations

from dataclasses import replace

from tandem.config.schema import Config
from tandem.plan.parts.batch import mini_batch_prompts
from tandem.plan.parts.entries import Entries, distillation_columns, estimator_columns
from tandem.plan.parts.flow import plan_flow
from tandem.plan.parts.placement import uses_reference
from tandem.plan.parts.preference import PREFERENCE_COLUMNS, learns_preferences
from tandem.plan.parts.teacher import learns_from_reward, teachers, teaches_as_tag
from tandem.stages.facts import ACTOR, OLD_ACTOR, REF, OldLogprobs, Step
from tandem.stages.stage import PlannedStage
from tandem.stages.table import plan_step

SOURCE_COLUMNS = (
    "prompts",
    "group_ids",
    "sample_index",
    "uid",
    "prompt_text",
    "ground_truth",
    "data_source",
    "extra_info",
)
"""What a prompt brings from the data."""


def old_logprobs_from(config: Config) -> OldLogprobs:
    """Return the source of the proximal log-probs.

    ``implied``: no column, old is the current policy, detached. ``auto`` takes it where that is exact (a partition has
    one optimizer step, so that every sample is seen under the weights of the step's start) and nothing before the loss
    reads the column: a KL in the reward, importance weights and some estimators do.
    """
    chosen = config.algorithm.old_logprobs
    if chosen != "auto":
        return chosen
    one_update = (
        config.actor_rollout_ref.actor.ppo_epochs == 1 and mini_batch_prompts(config) >= config.data.train_batch_size
    )
    read_before = bool(config.algorithm.correction.gives) or (
        uses_reference(config) and config.algorithm.kl.where == "reward"
    )
    read_before = read_before or "old_logprobs" in estimator_columns(config)
    elsewhere = plan_flow(config).apart  # the actor_fwd role has weights of its own
    return "implied" if one_update and not read_before and not elsewhere else "recompute"


def step_facts(config: Config, entries: Entries) -> Step:
    """Return what the stages decide by."""
    generates = not learns_preferences(config)
    entry = entries.policy_loss if generates else entries.preference_loss
    facts = Step(
        config=config,
        apart=plan_flow(config).apart,
        generates=generates,
        learns_from_reward=generates and learns_from_reward(config),
        reference=uses_reference(config),
        critic=generates and config.critic.enable,
        old_logprobs=old_logprobs_from(config) if generates else "implied",
        keeps_old_actor=OLD_ACTOR in plan_tags(config),
        teacher_columns=distillation_columns(config) if generates else (),
        teacher_is_tag=teaches_as_tag(config),
        correction_columns=config.algorithm.correction.gives if generates else (),
        scorer=entries.reward,
        estimator=entries.advantage.signature if entries.advantage is not None and entries.estimates else None,
        loss=None if entry is None else entry.signature,
    )
    return replace(facts, further_columns=tuple(name for stage in entries.stages for name in stage.gives(facts)))


def plan_stages(config: Config, entries: Entries) -> tuple[PlannedStage, ...]:
    """Return all stages of a step."""
    return plan_step(step_facts(config, entries), entries.stages)


def source_columns(entries: Entries, images: bool = False) -> tuple[str, ...]:
    """Return what a row of the data brings; ``images``: those that its prompt shows too."""
    columns = SOURCE_COLUMNS if entries.preference_loss is None else PREFERENCE_COLUMNS
    return (*columns, "images") if images else columns


def plan_tags(config: Config) -> tuple[str, ...]:
    """Return the copies of weights that the actor keeps."""
    tags, flow = [ACTOR], plan_flow(config)
    if not flow.apart and uses_reference(config):
        tags.append(REF)
    if teaches_as_tag(config):
        tags += [teacher.name for teacher in teachers(config)]
    if flow.old_actor:
        tags.append(OLD_ACTOR)
    return tuple(tags)


def plan_base_tags(config: Config) -> tuple[str, ...]:
    """Return the tags that are the base model, adapters switched off, and so cost no copy: a reference that never
    moves.

    A run that starts from an adapter has that in its reference, so it needs a copy.
    """
    section = config.actor_rollout_ref
    fresh = section.model.trains_adapters and section.model.adapter_path is None
    free = fresh and section.ref.update_interval is None
    return tuple(tag for tag in plan_tags(config) if tag == REF and free)


def columns_known(stages: tuple[PlannedStage, ...]) -> set[str]:
    """Return every column that the data or a stage gives."""
    return {*SOURCE_COLUMNS, *(name for stage in stages for name in stage.gives)}
