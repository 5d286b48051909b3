"""What a training loop of one's own can't have: it is synchronous, in one process, and draws and scores by itself."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.checks.model.split import ACTOR
from tandem.plan.checks.samples.episode import EPISODE, plays_episodes
from tandem.plan.parts.entries import advantage_name
from tandem.plan.plan import PREFERENCE, Plan
from tandem.plan.reads.form import unread
from tandem.plan.reads.own_trainer import LOOP_READS

NOT_FOR_A_LOOP = ("data", "trainer", "reward_manager", "evaluation")
"""Sections that a user's own loop may leave out: problems there are not its problems."""

_GIVEN = ("rewards", "reward_valid")
"""What ``compute_grpo_loss`` knows of the rewards."""


def check_own_loop(config: Config, plan: Plan) -> Iterator[Problem]:
    """Yield all that speaks against a loop of one's own with this config: the plan's problems, and what only others
    do.
    """
    found = (*plan.problems, *plan.later)
    yield from (problem for problem in found if problem.key.split(".")[0] not in NOT_FOR_A_LOOP)
    if plan.loop == PREFERENCE:
        reason = "it learns from given answers, and this builds a loop that generates them"
        remedy = "Use `tandem train`, or a loss such as ppo_clip"
        yield Problem("algorithm.policy_loss.type", config.algorithm.policy_loss.type, reason, remedy)
    elif plan.mode != "colocate":
        reason = "a loop of your own is synchronous: it generates, scores and trains in turn, in one process"
        yield Problem("execution.mode", plan.mode, reason, "Write colocate, or use `tandem train`")
    elif plan.runtime == "ray":
        reason = "a loop of your own has the actor and its engine in its own process"
        yield Problem("runtime.name", "ray", reason, "Give each role one device, and write local or auto")
    if config.actor_rollout_ref.actor.by_megatron:
        reason = "a loop of your own generates with the parameters that are trained, and Megatron-core's are others"
        yield Problem(f"{ACTOR}.strategy", "megatron", reason, "Write fsdp2, or use `tandem train`")
    if config.algorithm.filter_groups.enable:
        reason = "a loop of your own draws its prompts itself, so nobody draws others for groups that are left out"
        remedy = "Write false and leave out groups yourself, or use `tandem train`"
        yield Problem("algorithm.filter_groups.enable", True, reason, remedy)
    if plays_episodes(config):
        reason = "a loop of your own asks for one answer to each prompt, and plays no episodes"
        remedy = "Write single_turn, or use `tandem train`"
        yield Problem(f"{EPISODE}.type", config.actor_rollout_ref.rollout.episode.type, reason, remedy)
    if config.trainer.resume is not None:
        reason = "a loop of your own runs from start to end"
        yield Problem("trainer.resume", config.trainer.resume, reason, "Leave it out, or use `tandem train`")
    yield from _check_reward_columns(config, plan)


def _check_reward_columns(config: Config, plan: Plan) -> Iterator[Problem]:
    """Report other rewards than the one number per sample that a loop of one's own hands over."""
    more = {name for stage in plan.stages if stage.name == "reward" for name in stage.gives} - {*_GIVEN}
    needed = sorted(more & {name for stage in plan.stages for name in stage.needs})
    if needed:
        key = "algorithm.adv_estimator" + ("" if isinstance(config.algorithm.adv_estimator, str) else ".type")
        reason = f"it needs {', '.join(needed)}, and a loop of your own gives one reward per sample"
        yield Problem(key, advantage_name(config), reason, "Write one such as grpo, or use `tandem train`")


def unread_in_own_loop(config: Config) -> list[str]:
    """Return what a loop of one's own does by itself or not at all, of the keys that were written: one sentence a
    reason.
    """
    return unread(config, LOOP_READS, config, wrong=())[1]
