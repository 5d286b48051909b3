"""The stages of one step, in order, with the columns that each needs and gives: derived from signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tandem.base.registry import Entry, Signature
from tandem.config.schema import Config
from tandem.plan.batch import mini_batch_prompts
from tandem.plan.entries import Entries, distillation_columns, estimator_columns
from tandem.plan.placement import uses_reference
from tandem.plan.preference import PREFERENCE_COLUMNS
from tandem.plan.teacher import TEACHER, learns_from_reward, teachers, teaches_as_tag, uses_teacher
from tandem.reward.parts import component_names

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

ROLLOUT_COLUMNS = ("responses", "response_mask", "rollout_logprobs", "token_versions", "truncated")

SAMPLE_COLUMNS = {
    "response": "responses",
    "response_length": "responses",
    "prompt": "prompt_text",
    "ground_truth": "ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
    "truncated": "truncated",
}
"""What a scorer of single samples names its parameters -> the column that it comes from."""

COMPUTED_IN_TRAINING = ("logprobs", "entropies")
"""Arguments of a loss that the training forward makes; no column carries them."""

OldLogprobs = Literal["implied", "recompute", "rollout"]


@dataclass(frozen=True)
class Stage:
    """One thing done to a partition: by ``role``, with the weights ``tag`` in place, on a ``per`` part at a time."""

    name: str
    role: str
    tag: str | None
    per: Literal["group", "sub_batch", "partition"]
    needs: tuple[str, ...]
    gives: tuple[str, ...]


def old_logprobs_from(config: Config) -> OldLogprobs:
    """Where the proximal log-probs come from.

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
    elsewhere = config.execution.mode == "fully_async"  # the actor_fwd role has weights of its own
    return "implied" if one_update and not read_before and not elsewhere else "recompute"


def plan_stages(config: Config, entries: Entries) -> tuple[Stage, ...]:
    """All stages of a step."""
    if entries.preference_loss is not None:
        return _preference_stages(entries.preference_loss)
    stages = [
        Stage("rollout", "rollout", None, "group", ("prompts",), ROLLOUT_COLUMNS),
        Stage("reward", "reward", None, "group", _reward_needs(entries.reward), _reward_gives(config)),
        *_forwards(config, entries),
        *_correction(config),
        *([_advantages(config, entries)] if learns_from_reward(config) else []),
    ]
    if config.critic.enable:
        targets = ("prompts", "responses", "response_mask", "values", "returns")
        stages.append(Stage("train_critic", "critic", None, "partition", targets, ()))
    stages.append(_train(config, entries))
    stages.append(Stage("publish", "actor", "actor", "partition", (), ()))
    return tuple(stages)


def source_columns(entries: Entries) -> tuple[str, ...]:
    """What a row of the data brings."""
    return SOURCE_COLUMNS if entries.preference_loss is None else PREFERENCE_COLUMNS


def _preference_stages(loss: Entry[Any]) -> tuple[Stage, ...]:
    """The forwards that the loss asks for, then the train call: answers are given, nothing is generated or scored."""
    inputs, columns = ("prompts", "responses", "response_mask"), loss.signature.columns
    stages = []
    if "ref_logprobs" in columns:
        stages.append(Stage("ref", "actor", "ref", "partition", inputs, ("ref_logprobs",)))
    if "reference_point" in columns:
        given = (*inputs, "group_ids", "sample_index")
        stages.append(Stage("reference_point", "actor", "ref", "partition", given, ("reference_point",)))
    needs = dict.fromkeys([*inputs, *(name for name in columns if name not in COMPUTED_IN_TRAINING)])
    return (*stages, Stage("train", "actor", "actor", "partition", tuple(needs), ()))


def plan_tags(config: Config) -> tuple[str, ...]:
    """Copies of weights that the actor keeps."""
    tags = ["actor"]
    if config.execution.mode != "fully_async" and uses_reference(config):
        tags.append("ref")
    if teaches_as_tag(config):
        tags += [teacher.name for teacher in teachers(config)]
    if config.execution.mode == "hybrid" and config.execution.train_pipelining == "step":
        tags.append("old_actor")
    return tuple(tags)


def plan_base_tags(config: Config) -> tuple[str, ...]:
    """Tags that are the base model, adapters switched off, and so cost no copy: a reference that never moves.

    A run that starts from an adapter has that in its reference, so it needs a copy.
    """
    section = config.actor_rollout_ref
    fresh = section.model.trains_adapters and section.model.adapter_path is None
    free = fresh and section.ref.update_interval is None
    return tuple(tag for tag in plan_tags(config) if tag == "ref" and free)


def columns_known(stages: tuple[Stage, ...]) -> set[str]:
    """Every column that the data or a stage gives."""
    return {*SOURCE_COLUMNS, *(name for stage in stages for name in stage.gives)}


def _reward_needs(signature: Signature | None) -> tuple[str, ...]:
    fields = signature.columns + signature.optional_columns if signature is not None else ()
    needs = ["prompts", "responses", "response_mask", *(SAMPLE_COLUMNS.get(name, name) for name in fields)]
    return tuple(dict.fromkeys(needs))


def _reward_gives(config: Config) -> tuple[str, ...]:
    reward = config.reward_manager
    parts = component_names(reward.type, reward.file, reward.parameters)
    greedy = "reward_baselines" in estimator_columns(config)
    return (
        "rewards",
        "reward_valid",
        *(["reward_components"] if parts else []),
        *(["reward_baselines"] if greedy else []),
    )


def _forwards(config: Config, entries: Entries) -> list[Stage]:
    separate = config.execution.mode == "fully_async"
    per: Literal["sub_batch", "partition"] = "partition" if config.execution.mode == "colocate" else "sub_batch"
    inputs = ("prompts", "responses", "response_mask")
    stages = []
    if uses_reference(config):
        role = "reference" if separate else "actor"
        stages.append(Stage("ref", role, None if separate else "ref", per, inputs, ("ref_logprobs",)))
    if uses_teacher(config):
        role, tag = ("actor", TEACHER) if teaches_as_tag(config) else (TEACHER, None)
        sorted_by = ("data_source",) if config.actor_rollout_ref.teacher.by_source else ()
        stages.append(Stage(TEACHER, role, tag, per, (*inputs, *sorted_by), distillation_columns(config)))
    source = old_logprobs_from(config)
    if source == "recompute":
        tag = "old_actor" if "old_actor" in plan_tags(config) else "actor"
        role = "actor_fwd" if separate else "actor"
        squares = ("sum_pi_squared",) if "sum_pi_squared" in estimator_columns(config) else ()
        gives = ("old_logprobs", *squares, *(("old_version",) if separate else ()))
        stages.append(Stage("old", role, None if separate else tag, per, inputs, gives))
    elif source == "rollout":
        stages.append(Stage("old", "actor", None, per, ("rollout_logprobs",), ("old_logprobs",)))
    if config.critic.enable:
        stages.append(Stage("values", "critic", None, per, inputs, ("values",)))
    return stages


def _correction(config: Config) -> list[Stage]:
    gives = config.algorithm.correction.gives
    if not gives:
        return []
    role = "advantages" if config.execution.mode == "fully_async" else "actor"
    needs = ("old_logprobs", "rollout_logprobs", "response_mask")
    return [Stage("correction", role, None, "partition", needs, gives)]


def _advantages(config: Config, entries: Entries) -> Stage:
    needs: list[str] = ["rewards"]
    signature = entries.advantage.signature if entries.advantage is not None else None
    if signature is not None:
        needs += [name for name in signature.columns if name != "token_rewards"]
        there = ("reward_valid", "truncated", *config.algorithm.correction.gives)
        needs += [name for name in signature.optional_columns if name in there]
    if uses_reference(config) and config.algorithm.kl.where == "reward":
        needs += ["old_logprobs", "ref_logprobs"]
    role = "advantages" if config.execution.mode == "fully_async" else "actor"
    gives = ("token_rewards", "advantages", "returns")
    return Stage("advantages", role, None, "partition", tuple(dict.fromkeys(needs)), gives)


def _train(config: Config, entries: Entries) -> Stage:
    needs: list[str] = ["prompts", "responses", "response_mask"]
    if entries.policy_loss is not None:
        signature = entries.policy_loss.signature
        needs += [name for name in signature.columns if name not in COMPUTED_IN_TRAINING]
        needs += [name for name in signature.optional_columns if name in config.algorithm.correction.gives]
    needs += [name for name in config.algorithm.correction.gives if name == "loss_mask"]
    if uses_reference(config) and config.algorithm.kl.where == "loss":
        needs.append("ref_logprobs")
    needs += distillation_columns(config)
    if not learns_from_reward(config):
        needs = [name for name in needs if name != "advantages"]
    implied = old_logprobs_from(config) == "implied"
    kept = [name for name in dict.fromkeys(needs) if not (implied and name == "old_logprobs")]
    return Stage("train", "actor", "actor", "partition", tuple(kept), ())
