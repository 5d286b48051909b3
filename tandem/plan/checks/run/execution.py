"""Contradictions in where and when things run: devices, batches, staleness."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.parts.batch import longest_sequence, mini_batch_prompts
from tandem.plan.parts.engine import engine_capabilities, engine_width
from tandem.plan.parts.entries import estimator_columns
from tandem.plan.parts.flow import plan_flow
from tandem.plan.parts.placement import ADVANTAGES, REFERENCE_NAMES, Placement, choose_runtime, deployed_roles
from tandem.plan.parts.preference import learns_preferences, samples_per_prompt
from tandem.plan.parts.teacher import uses_teacher
from tandem.stages.facts import TEACHER

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
P = "data.train_batch_size"


def check_execution(config: Config, placed: tuple[Placement, ...]) -> Iterator[Problem]:
    """Yield every problem of the mode, its devices and its sizes."""
    yield from _check_roles(config)
    yield from _check_devices(config, placed)
    yield from _check_batches(config)
    yield from _check_capacity(config)
    yield from _check_budgets(config)
    yield from _check_pipelining(config)


def _check_roles(config: Config) -> Iterator[Problem]:
    mode, resource = config.execution.mode, config.execution.resource
    needs_tags, written = mode != "fully_async", config.actor_rollout_ref.hybrid_engine
    if written is not None and written is not needs_tags:
        what = "ref and old_actor are tags inside the actor" if needs_tags else "the reference is a role of its own"
        remedy = f"Remove it (it follows from the mode), or write {str(needs_tags).lower()}"
        yield Problem("actor_rollout_ref.hybrid_engine", written, f"in {mode} {what}", remedy)
    roles = deployed_roles(config)
    for role, devices in resource.items():
        key, value = f"execution.resource.{role}", list(devices)
        if role in roles or (role == "ref" and "reference" in roles):
            continue
        if needs_tags and role in REFERENCE_NAMES:
            yield Problem(
                key, value, f"ref is a tag here: in {mode} it takes turns on the actor's devices", "Remove this entry"
            )
        elif role == TEACHER and uses_teacher(config):
            reason = f"the teacher is a tag here: in {mode} it takes turns on the actor's devices"
            yield Problem(key, value, reason, "Remove this entry")
        elif role == TEACHER:
            remedy = "Remove this entry, or write algorithm.distillation"
            yield Problem(key, value, "nothing is learned from a teacher", remedy)
        elif role == "critic":
            yield Problem(key, value, "there is no critic", "Remove this entry, or write critic.enable: true")
        elif role in REFERENCE_NAMES:
            yield Problem(key, value, "nothing compares with a reference: no KL is asked for", "Remove this entry")
        else:
            remedy = f"Remove this entry; {mode} deploys {', '.join(roles)}"
            yield Problem(key, value, f"{mode} has no role of its own for it", remedy)
    if set(REFERENCE_NAMES) <= set(resource):
        value = list(resource["ref"])
        yield Problem(
            "execution.resource.ref", value, "ref and reference are the same role", "Keep one of the two entries"
        )


def _check_devices(config: Config, placed: tuple[Placement, ...]) -> Iterator[Problem]:
    devices = {placement.role: placement.devices for placement in placed}
    for role, pair in config.execution.resource.items():
        if pair[1] == 0 and role != ADVANTAGES:
            reason = "a model computes there, on one device at least"
            yield Problem(f"execution.resource.{role}", list(pair), reason, "Write [1, 1] or more")
    actor = config.actor_rollout_ref.actor
    widths = (
        ("actor", f"{ACTOR}.tensor_model_parallel_size", actor.tensor_model_parallel_size),
        ("actor", f"{ACTOR}.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size),
        ("rollout", f"{ROLLOUT}.tensor_model_parallel_size", engine_width(config)),
    )
    for name, key, width in widths:
        if name in devices and devices[name] % width:
            reason = f"it doesn't divide the {devices[name]} devices of {name}"
            remedy = f"Write a divisor of {devices[name]}, or change execution.resource.{name}"
            yield Problem(key, width, reason, remedy)
    if config.runtime.threads and choose_runtime(config, placed) == "ray":
        reason = "on Ray every rank and every engine is a process of its own"
        yield Problem("runtime.threads", True, reason, "Write false, or give each role one device and write local")
    wide = [f"{role} {count}" for role, count in devices.items() if count > 1]
    if wide and choose_runtime(config, placed) == "local":
        reason = f"the local runtime has one device a role, and the resource gives {', '.join(wide)}"
        yield Problem("runtime.name", config.runtime.name, reason, "Write runtime.name: ray, or auto")


def _check_batches(config: Config) -> Iterator[Problem]:
    actor, prompts, n = config.actor_rollout_ref.actor, config.data.train_batch_size, samples_per_prompt(config)
    slices = plan_flow(config).sub_batches
    if prompts % slices:
        reason = f"{P} = {prompts} prompts can't be cut into so many equal sub-batches"
        yield Problem("execution.num_iters_per_train_update", slices, reason, f"Write a divisor of {prompts}")
    whole, written = actor.global_batch_size, actor.ppo_mini_batch_size
    if whole is not None and whole % n:
        reason = f"it counts samples, and {ROLLOUT}.n = {n} samples of a prompt stay together"
        yield Problem(f"{ACTOR}.global_batch_size", whole, reason, f"Write a multiple of {n}")
        return
    if whole is not None and written is not None and written * n != whole:
        reason = f"ppo_mini_batch_size = {written} prompts x n = {n} are {written * n} samples"
        yield Problem(f"{ACTOR}.global_batch_size", whole, reason, f"Write {written * n}, or only one of the two")
    mini = mini_batch_prompts(config)
    key, value = (f"{ACTOR}.ppo_mini_batch_size", mini) if whole is None else (f"{ACTOR}.global_batch_size", whole)
    if mini > prompts:
        reason = f"an optimizer step can't take more than the {prompts} prompts of a step ({P})"
        yield Problem(key, value, reason, f"Write at most {prompts if whole is None else prompts * n}, or raise {P}")
    elif prompts % mini:
        reason = f"{P} = {prompts} prompts can't be cut into mini-batches of {mini} prompts"
        yield Problem(key, value, reason, f"Write a divisor of {prompts if whole is None else prompts * n}")
    micro = actor.ppo_micro_batch_size
    if micro is not None and mini * n % micro:
        reason = f"a mini-batch of {mini} prompts x {n} = {mini * n} samples can't be cut into micro-batches of it"
        yield Problem(f"{ACTOR}.ppo_micro_batch_size", micro, reason, f"Write a divisor of {mini * n}, or leave it out")


def _check_capacity(config: Config) -> Iterator[Problem]:
    """Check that a partition fits into the store whole: it is sealed when all of its groups are there."""
    capacity, prompts = config.execution.data_plane.capacity_groups, config.data.train_batch_size
    if capacity is not None and capacity < prompts and not learns_preferences(config):
        reason = f"a partition of {prompts} groups ({P}) is held whole"
        yield Problem("execution.data_plane.capacity_groups", capacity, reason, f"Write at least {prompts}")


def _check_budgets(config: Config) -> Iterator[Problem]:
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    longest = longest_sequence(config)
    if actor.micro_batch_tokens < longest:
        reason = (
            f"one sequence can have {longest} tokens (data.max_prompt_length {data.max_prompt_length} + "
            f"data.max_response_length {data.max_response_length}), more than the token budget of a micro-batch"
        )
        value, least = actor.ppo_max_token_len_per_gpu, math.ceil(longest / actor.ulysses_sequence_parallel_size)
        yield Problem(f"{ACTOR}.ppo_max_token_len_per_gpu", value, reason, f"Write at least {least}")
    chunked = engine_capabilities(config).chunked_prefill and rollout.enable_chunked_prefill
    if rollout.max_num_batched_tokens < data.max_prompt_length and not chunked:
        reason = f"one prompt can have {data.max_prompt_length} tokens (data.max_prompt_length)"
        remedy = f"Write at least {data.max_prompt_length}"
        yield Problem(f"{ROLLOUT}.max_num_batched_tokens", rollout.max_num_batched_tokens, reason, remedy)
    greedy = "reward_baselines" in estimator_columns(config)
    most = max(rollout.n + greedy, config.evaluation.n)
    if rollout.max_num_seqs < most:
        reason = f"the {most} samples of a prompt are in flight together"
        yield Problem(f"{ROLLOUT}.max_num_seqs", rollout.max_num_seqs, reason, f"Write at least {most}")


def _check_pipelining(config: Config) -> Iterator[Problem]:
    execution = config.execution
    if execution.mode != "hybrid" or execution.train_pipelining == "off":
        return
    key, value = "execution.train_pipelining", execution.train_pipelining
    prompts, mini, slices = config.data.train_batch_size, mini_batch_prompts(config), plan_flow(config).sub_batches
    if value == "accumulate":
        if config.actor_rollout_ref.actor.ppo_epochs != 1:
            yield Problem(
                key, value, "it makes one update of one pass, and ppo_epochs is more", "Write ppo_epochs: 1, or off"
            )
        if mini != prompts:
            reason = f"it makes one update of the whole partition, and a mini-batch has {mini} of {prompts} prompts"
            yield Problem(key, value, reason, "Leave ppo_mini_batch_size out, or write train_pipelining: step")
    elif mini * slices != prompts:
        reason = f"each of the {slices} sub-batches is a mini-batch, and one has {mini} of {prompts} prompts"
        yield Problem(key, value, reason, "Leave ppo_mini_batch_size out")
