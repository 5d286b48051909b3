"""Contradictions in preference training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tandem.base.errors import Problem
from tandem.base.registry import Entry
from tandem.config.schema import Config
from tandem.plan.checks.learning.algorithm import LOSS, ROLLOUT, check_reference
from tandem.plan.checks.parameters import check_parameters, is_number
from tandem.plan.checks.samples.data import (
    Form,
    Read,
    check_files,
    check_forms,
    check_given,
    check_overlap,
    template_columns,
)
from tandem.plan.parts.batch import longest_sequence
from tandem.plan.parts.preference import PREFERENCE_COLUMNS

STAGED = ("logprobs", "ref_logprobs", "reference_point")
"""Columns that a stage or the training forward gives."""


WEIGHTS = ("desirable_weight", "undesirable_weight")


def check_preferences(config: Config, loss: Entry[Any], images: bool = False) -> Iterator[Problem]:
    """Yield every problem of training on preferences; ``images`` are read of them too."""
    yield from _check_loss(config, loss)
    yield from _check_ignored(config)
    yield from check_reference(config)
    yield from _check_data(config, loss, Read(images, config.data.image_key))
    yield from _check_budget(config, loss)


def _check_loss(config: Config, loss: Entry[Any]) -> Iterator[Problem]:
    written = config.algorithm.policy_loss
    yield from check_parameters(LOSS, "preference loss", loss.name, written.parameters, loss.signature)
    known = loss.signature.parameters
    weights = [written.parameters.get(name, known[name].default) for name in WEIGHTS if name in known]
    if weights and all(is_number(weight) and weight == 0 for weight in weights):
        reason = "good and bad answers both weigh 0, so nothing would be learned"
        yield Problem(f"{LOSS}.{WEIGHTS[0]}", 0, reason, f"Write a number above 0 for it or for {WEIGHTS[1]}")
    for name in loss.signature.columns:
        if name not in (*PREFERENCE_COLUMNS, *STAGED):
            reason = f"{loss.name} needs the column {name!r}, which preference data don't give"
            remedy = f"Use another loss. If it is yours: columns are {', '.join((*PREFERENCE_COLUMNS[:5], *STAGED))}"
            yield Problem(f"{LOSS}.type", loss.name, reason, remedy)


def _check_ignored(config: Config) -> Iterator[Problem]:
    """Check what would change the result of a run with rewards and can't here."""
    algorithm, execution, name = config.algorithm, config.execution, config.algorithm.policy_loss.type
    if execution.mode != "colocate":
        reason = f"{name} learns from given answers: nothing is generated that could go on beside the training"
        yield Problem("execution.mode", execution.mode, reason, "Write colocate, or leave it out")
    if config.critic.enable:
        yield Problem("critic.enable", True, f"{name} has no rewards to estimate", "Write false")
    if algorithm.kl.where != "off":
        reason = f"{name} is a comparison and has no KL term"
        yield Problem("algorithm.kl.in", algorithm.kl.where, reason, "Leave it out, or write off")
    if config.actor_rollout_ref.rollout.temperature != 1.0:
        value, reason = config.actor_rollout_ref.rollout.temperature, "given answers have log-probs at temperature 1"
        yield Problem(f"{ROLLOUT}.temperature", value, reason, "Leave it out, or write 1.0")


def _check_data(config: Config, loss: Entry[Any], seen: Read) -> Iterator[Problem]:
    data, paired = config.data, "group_ids" in loss.signature.columns
    if data.label_key is None and data.chosen_key == data.rejected_key:
        reason = f"the better and the worse answer are the same column {data.chosen_key!r}"
        yield Problem("data.rejected_key", data.rejected_key, reason, "Write the column of the worse answer")
    if data.label_key is not None and data.label_key == data.response_key:
        reason = "it is the column of the answer, and a label is true or false"
        yield Problem("data.label_key", data.label_key, reason, "Write the column of the label")
    if data.label_key is not None and paired:
        reason = f"{loss.name} compares the two answers of a prompt, and labelled rows have one each"
        yield Problem("data.label_key", data.label_key, reason, f"Leave it out, or write {LOSS}.type: kto")
    if data.reasoning_gym is not None:
        reason = f"{loss.name} learns from given answers, and a procedural task gives questions"
        yield Problem("data.reasoning_gym", "...", reason, "Write data.train_files or data.source with preferences")
        return
    yield from check_given(data)
    answers = {"chosen_key": data.chosen_key, "rejected_key": data.rejected_key}
    if data.label_key is not None:
        answers = {"response_key": data.response_key, "label_key": data.label_key}
    keys = [(f"data.{key}", column) for key, column in answers.items()]
    keys += [("data.template", name) for name in template_columns(data.template)]
    others = {"uid_key": data.uid_key, "data_source_key": data.data_source_key, "tools_key": data.tools_key}
    others |= {"image_key": data.image_key} if seen.images else {}
    keys += [(f"data.{key}", name) for key, name in others.items() if name is not None]
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for problem in check_files(key, files, keys, data.on_bad_row, seen):
            named = problem.key.removeprefix("data.") in answers
            yield replace(problem, remedy=_remedy(config, loss, paired)) if named else problem
        forms: dict[str, tuple[str, Form]] = {
            f"data.{name}": (column, "label" if name == "label_key" else "answer")
            for name, column in answers.items()
            if (name, column) != ("label_key", data.response_key)  # refused already
        }
        yield from check_forms(files, data.on_bad_row, forms, seen)
    yield from check_overlap(data.train_files, data.val_files)


def _remedy(config: Config, loss: Entry[Any], paired: bool) -> str:
    if config.data.label_key is not None:
        return "Write the columns of the answer and of its label (data.response_key, data.label_key)"
    labelled = "" if paired else ", or data.label_key for rows of one answer and a label"
    return (
        f"{loss.name} learns from pairs: write the columns of the better and the worse answer (data.chosen_key, "
        f"data.rejected_key){labelled}; to learn from rewards write {LOSS}.type: ppo_clip"
    )


def _check_budget(config: Config, loss: Entry[Any]) -> Iterator[Problem]:
    budget, longest = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, longest_sequence(config)
    if "group_ids" in loss.signature.columns and longest <= budget < 2 * longest:
        reason = f"a pair stays in one micro-batch and can have twice {longest} tokens"
        yield Problem(
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", budget, reason, f"Write at least {2 * longest}"
        )
    if "reference_point" in loss.signature.columns and config.data.train_batch_size < 2:
        reason = f"{loss.name} estimates a KL on prompts with answers to other prompts, and a step has one prompt"
        yield Problem("data.train_batch_size", config.data.train_batch_size, reason, "Write 2 or more")
