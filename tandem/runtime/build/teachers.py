"""The planned teachers, ready to score: tags of the actor, models beside it, or roles of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from tandem.algorithms.distillation import DISTILLATIONS, teacher_columns
from tandem.base.errors import ConfigError
from tandem.config.schema import Config
from tandem.models.causal_lm import CausalLM
from tandem.models.tokenizer import load_tokenizer
from tandem.plan.checks.learning.teacher import another_tokenizer, comparable, differing
from tandem.plan.parts.entries import distillation_parameter
from tandem.plan.plan import Plan
from tandem.roles.serving import Scorer
from tandem.roles.teachers import Forward, TeacherStage, wanted_of_teacher
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.stages.facts import TEACHER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_tokenizers(config: Config, plan: Plan, own: PreTrainedTokenizerBase) -> None:
    """Refuse a teacher of another vocabulary where the plan could not compare them. Raises ``ConfigError``."""
    for teacher in plan.teachers:
        if comparable(config, teacher):
            continue
        trusted = config.actor_rollout_ref.model.trust_remote_code  # a teacher's model is loaded with it too
        its = load_tokenizer(teacher.path, trust_remote_code=trusted)
        difference = differing(own.get_vocab(), its.get_vocab())
        if difference is not None:
            raise ConfigError([another_tokenizer(teacher, difference)])


def load_teachers(
    config: Config, plan: Plan, ranks: TrainGroup[TrainRank], scorer: Callable[..., Scorer] | None
) -> dict[str, Forward]:
    """Bring the teachers where the plan has them; the forward of each by name.

    On devices of their own, ``scorer`` (of ``Runtime``) makes them; else, or without it, they are on the actor's ranks.
    """
    if scorer is not None and TEACHER in plan.device_groups:
        return {teacher.name: scorer(TEACHER, moves=False, path=teacher.path).forward for teacher in plan.teachers}
    model = config.actor_rollout_ref.model
    for teacher in plan.teachers:
        if teacher.name in plan.tags:
            ranks.call(TrainRank.load_tag, teacher.name, teacher.path, model.trust_remote_code)
        else:
            ranks.call(TrainRank.load_beside, teacher.name, teacher.path, model.dtype, model.trust_remote_code)
    return {teacher.name: partial(ranks.forward, tag=teacher.name) for teacher in plan.teachers}


def teacher_stage(config: Config, plan: Plan, forwards: Mapping[str, Forward], student: CausalLM) -> TeacherStage:
    """Return what runs as the stage ``teacher``, wherever the ``forwards`` are made."""
    teaching = config.algorithm.distillation
    assert teaching is not None  # the plan has the stage
    columns = teacher_columns(DISTILLATIONS[teaching.type].signature)
    vocabulary = student.head.size
    return TeacherStage(
        forwards,
        by_source={source: teacher.name for teacher in plan.teachers for source in teacher.sources},
        rest=next((teacher.name for teacher in plan.teachers if teacher.rest), None),
        want=wanted_of_teacher(columns, distillation_parameter(config, "top_k"), vocabulary),
    )
