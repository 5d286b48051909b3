"""Contradictions in whom and how the actor learns by distillation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tandem.base.errors import Problem
from tandem.config.model import ModelConfig
from tandem.config.schema import NO_REWARD, Config, DistillationConfig
from tandem.plan.checks.model.folder import check_files_of
from tandem.plan.checks.model.model import read_checked
from tandem.plan.checks.parameters import check_parameters
from tandem.plan.checks.samples.data import named_sources
from tandem.plan.files.model import ModelFacts, model_folder, sampled_tokens, vocabulary_of
from tandem.plan.parts.batch import longest_sequence
from tandem.plan.parts.entries import Entries, distillation_parameter
from tandem.plan.parts.teacher import (
    Teacher,
    learns_from_reward,
    obstacle_to_tag,
    teachers,
    teaches_as_tag,
    uses_teacher,
)

KEY = "actor_rollout_ref.teacher"
OBJECTIVE = "algorithm.distillation"


def check_teacher(config: Config, entries: Entries, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield every problem of the teachers; ``facts`` are the actor's."""
    teaching = config.algorithm.distillation
    yield from _check_named(config)
    yield from _check_objective(config, entries, facts)
    if not learns_from_reward(config):
        yield from _check_only(config)
    elif config.reward_manager.type == NO_REWARD and not (teaching is not None and teaching.only):
        reason = "nothing is scored, and the reward is what is learned from"
        remedy = f"Write a scorer, or {OBJECTIVE}.only: true with a teacher"
        yield Problem("reward_manager.type", NO_REWARD, reason, remedy)
    for teacher in teachers(config):
        yield from _check_model(config, teacher, facts)
    yield from _check_other(config)
    yield from _check_sources(config)


def _check_other(config: Config) -> Iterator[Problem]:
    """Check whether there is anything to learn from the teachers, where nothing else is learned from."""
    model, found = config.actor_rollout_ref.model, teachers(config)
    own = model_folder(model.path)
    if learns_from_reward(config) or own is None or model.adapter_path is not None or not found:
        return
    folders = [model_folder(teacher.path) for teacher in found]
    if all(folder is not None and folder.resolve() == own.resolve() for folder in folders):
        reason = "it is the model that is trained: they agree on every token, and nothing else is learned from"
        yield Problem(key_of(found[0]), found[0].path, reason, f"Name another model, or write {OBJECTIVE}.only: false")


def notes_on_teacher(config: Config) -> Iterator[str]:
    """Note how the teachers live, and what their objective leaves without effect."""
    if not uses_teacher(config):
        return
    if not teaches_as_tag(config):
        yield f"a teacher is a model of its own, not a tag of the actor: {obstacle_to_tag(config)}"
    if not learns_from_reward(config) and config.reward_manager.type != NO_REWARD:
        yield f"{OBJECTIVE}.only is true: rewards are reported and train nothing"
    for teacher in teachers(config):
        if not comparable(config, teacher):
            yield f"{teacher.path}: its vocabulary can't be compared with the actor's before they are loaded"


def _check_named(config: Config) -> Iterator[Problem]:
    section, teaching = config.actor_rollout_ref.teacher, config.algorithm.distillation
    named = section.path is not None or bool(section.by_source)
    if uses_teacher(config) and not named:
        reason = f"{OBJECTIVE} learns from a teacher, and none is named"
        yield Problem(
            f"{KEY}.path", None, reason, "Write the folder of a trained model, or by_source: {SOURCE: FOLDER}"
        )
    if named and teaching is None:
        key, value = (f"{KEY}.path", section.path) if section.path is not None else (f"{KEY}.by_source", "...")
        remedy = f"Write {OBJECTIVE}: {{type: reverse_kl}}, or remove the teacher"
        yield Problem(key, value, "nothing is learned from it: there is no algorithm.distillation", remedy)


def _check_objective(config: Config, entries: Entries, facts: ModelFacts | None) -> Iterator[Problem]:
    teaching, entry = config.algorithm.distillation, entries.distillation
    if teaching is None or entry is None:
        return
    own, written = list(DistillationConfig.model_fields), teaching.parameters
    yield from check_parameters(OBJECTIVE, "distillation", teaching.type, written, entry.signature, own)
    if teaching.only and teaching.coef == 0:
        reason = "the teacher is all that is learned from, and its weight is 0"
        yield Problem(f"{OBJECTIVE}.coef", 0.0, reason, "Write a weight above 0, or only: false")
    top_k, most = distillation_parameter(config, "top_k"), sampled_tokens(config.actor_rollout_ref.model, facts)
    if isinstance(top_k, int) and most is not None and top_k > most:
        reason = f"the teacher's likeliest tokens are compared, of {most}"
        yield Problem(f"{OBJECTIVE}.top_k", top_k, reason, f"Write a number from 1 to {most}")


def _check_only(config: Config) -> Iterator[Problem]:
    """Check what reads a reward where none trains."""
    algorithm, evaluation = config.algorithm, config.evaluation
    if algorithm.filter_groups.enable:
        reason = "it drops groups by their rewards, and only a teacher is learned from"
        yield Problem("algorithm.filter_groups.enable", True, reason, f"Write false, or {OBJECTIVE}.only: false")
    if algorithm.kl.where == "reward" and algorithm.kl.coef > 0:
        reason = "there is no reward to take it from: only a teacher is learned from"
        yield Problem("algorithm.kl.in", "reward", reason, f"Write loss, or {OBJECTIVE}.only: false")
    if config.critic.enable:
        reason = "its values estimate rewards, and only a teacher is learned from"
        yield Problem("critic.enable", True, reason, f"Write false, or {OBJECTIVE}.only: false")
    if config.reward_manager.type == NO_REWARD and evaluation.during_run:
        key, value = ("interval", evaluation.interval) if evaluation.interval else ("at_start", True)
        reason = "held-out answers would be scored, and there is no scorer"
        yield Problem(f"evaluation.{key}", value, reason, "Write a reward_manager, which then trains nothing, or 0")


def _check_model(config: Config, teacher: Teacher, facts: ModelFacts | None) -> Iterator[Problem]:
    key = key_of(teacher)
    model = ModelConfig(path=teacher.path)
    theirs, problems = read_checked(key, model)
    files = [] if problems else [replace(problem, key=key) for problem in check_files_of(key, model)]
    for problem in [*problems, *files]:
        adapter = "LoRA adapter" in problem.reason
        remedy = "Merge it into its model first (tandem export), and name that folder" if adapter else problem.remedy
        yield Problem(key, problem.value, problem.reason, remedy)
    folder, own = model_folder(teacher.path), model_folder(config.actor_rollout_ref.model.tokenizer)
    if theirs is None or folder is None:
        return
    mine, other = None if own is None else vocabulary_of(own), vocabulary_of(folder)
    difference = None if mine is None or other is None else differing(mine, other)
    if difference is not None:
        yield another_tokenizer(teacher, difference)
    most = sampled_tokens(config.actor_rollout_ref.model, facts)
    found = difference is not None or bool(files)
    if not found and most is not None and theirs.vocabulary is not None and theirs.vocabulary < most:
        reason = f"it embeds {theirs.vocabulary} tokens, and the actor can sample {most}"
        yield Problem(key, teacher.path, reason, "Take a teacher with at least as many")
    longest = longest_sequence(config)
    if theirs.context is not None and theirs.context.tokens < longest:
        reason = f"a sequence can have {longest} tokens, and {theirs.context.why}"
        yield Problem(key, teacher.path, reason, "Lower data.max_response_length, or take a teacher with a longer one")


def comparable(config: Config, teacher: Teacher) -> bool:
    """Return whether the vocabularies of actor and teacher can be read without loading their tokenizers."""
    folders = (model_folder(path) for path in (config.actor_rollout_ref.model.tokenizer, teacher.path))
    return all(folder is not None and vocabulary_of(folder) is not None for folder in folders)


def key_of(teacher: Teacher) -> str:
    """Return the key under which the config names the teacher."""
    return f"{KEY}.path" if teacher.rest else f"{KEY}.by_source.{teacher.sources[0]}"


def another_tokenizer(teacher: Teacher, difference: str) -> Problem:
    """Return the problem of a teacher that reads other tokens."""
    remedy = "Take a teacher with the actor's tokenizer: token ids travel, not text"
    reason = f"its tokenizer is another than the actor's: {difference}"
    return Problem(key_of(teacher), teacher.path, reason, remedy)


def differing(own: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """Return the first token of which two vocabularies (token -> id) say different things; None where they are
    equal.
    """
    if own == theirs:
        return None
    for token in sorted(own.keys() | theirs.keys(), key=lambda t: (own.get(t, theirs.get(t, 0)), t)):
        if own.get(token) != theirs.get(token):
            here, there = own.get(token, "none"), theirs.get(token, "none")
            return f"token {token!r} has id {here} in the actor's and {there} in the teacher's"
    return None


def _check_sources(config: Config) -> Iterator[Problem]:
    """Yield the files whose rows have a data source by their name, where no teacher is for the rest."""
    section, data = config.actor_rollout_ref.teacher, config.data
    if not uses_teacher(config) or section.path is not None or not section.by_source:
        return
    for source in named_sources(data, data.train_files):
        if source not in section.by_source:
            reason = f"the prompts of {source!r} have no teacher"
            remedy = f"Write {KEY}.by_source.{source}, {KEY}.path for the rest, or data.data_source_key"
            yield Problem(f"{KEY}.by_source", ", ".join(section.by_source), reason, remedy)
