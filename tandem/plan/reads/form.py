"""Keys that are read only in some configurations: the form of the tables, and what they say of what was written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tandem.base.errors import Problem
from tandem.config.model import ModelConfig
from tandem.config.node import Node, TypedNode
from tandem.config.schema import DataConfig, SftDataConfig
from tandem.config.trainer import TrainerConfig
from tandem.plan.files.mix import has_united_rows

S = TypeVar("S")
"""What a run is to be: its config, and what else decides who reads a key."""


@dataclass(frozen=True)
class Reads(Generic[S]):
    """``keys``, and all below them, are read where ``where`` holds.

    Elsewhere a key that was written with another value than its default is refused with ``reason`` and ``remedy``, or
    noted where ``noted`` says so: what one line of config switches on and off may stay.
    """

    keys: tuple[str, ...]
    where: Callable[[S], bool]
    reason: str | Callable[[S], str]
    remedy: str = "Leave it out"
    noted: bool = False

    def names(self, key: str) -> bool:
        """Return whether it is about ``key``."""
        return any(key == own or key.startswith(f"{own}.") for own in self.keys)

    def why(self, setting: S) -> str:
        """Return the reason why nothing reads its keys."""
        return self.reason if isinstance(self.reason, str) else self.reason(setting)


def schedule_reads(prefix: str, schedule_of: Callable[[S], str]) -> tuple[Reads[S], ...]:
    """Return the reads of an optimizer's section at ``prefix``."""
    return (
        Reads(
            (f"{prefix}.min_lr_ratio",),
            lambda s: schedule_of(s) != "constant",
            "the learning rate is constant and has no end to fall to",
            f"Write {prefix}.schedule: linear or cosine, or leave it out",
        ),
        Reads(
            (f"{prefix}.num_cycles",),
            lambda s: schedule_of(s) == "cosine",
            lambda s: f"the schedule is {schedule_of(s)}, which has no periods",
            f"Write {prefix}.schedule: cosine, or leave it out",
        ),
    )


def adapter_reads(prefix: str, model_of: Callable[[S], ModelConfig | None]) -> tuple[Reads[S], ...]:
    """Return the reads of LoRA in a model's section at ``prefix``."""

    def made(setting: S) -> bool:
        model = model_of(setting)
        return model is not None and model.lora_rank > 0 and model.adapter_path is None

    def trained(setting: S) -> bool:
        model = model_of(setting)
        return model is not None and model.trains_adapters

    def reason(setting: S) -> str:
        if trained(setting):
            return "the adapter that the run starts from has its own"
        return "there are no adapters: all weights are trained, and held in float32"

    remedy = "Remove it, or write lora_rank: 16"
    return (
        Reads((f"{prefix}.lora_alpha", f"{prefix}.lora_target_modules"), made, reason, remedy),
        Reads((f"{prefix}.lora_base_dtype",), trained, reason, remedy),
    )


def file_reads(data_of: Callable[[S], SftDataConfig | DataConfig]) -> Reads[S]:
    """Return the reads of nulls in files of rows."""
    reason = "a null in JSON lines was written and stays"
    return Reads(("data.keep_nulls",), lambda s: has_united_rows(data_of(s)), reason, noted=True)


def template_reads(renders: Callable[[S], bool]) -> Reads[S]:
    """Return the reads of what changes a chat template."""
    keys = ("data.chat_template", "data.chat_template_kwargs")
    reason = "rows are plain text, which no chat template renders"
    return Reads(keys, renders, reason, "Write data.chat: true, or rows of messages, or leave it out")


def checkpoint_reads(trainer_of: Callable[[S], TrainerConfig]) -> Reads[S]:
    """Return the reads of a run which may write checkpoints."""
    reason = "no checkpoint is written: trainer.save_interval is 0"
    return Reads(("trainer.keep_checkpoints",), lambda s: _saves(trainer_of(s)), reason, noted=True)


def _saves(trainer: TrainerConfig) -> bool:
    return trainer.save_interval > 0 or trainer.keep_best is not None


@dataclass(frozen=True)
class Written:
    """A key that was written, and what it is where nothing is."""

    key: str
    value: Any
    default: Any = field(default=PydanticUndefined)

    @property
    def changes(self) -> bool:
        """Whether it says something else than what would be there anyway."""
        return bool(self.value != self.default)


def written(node: BaseModel, default: BaseModel | None = None, prefix: str = "") -> Iterator[Written]:
    """Yield every key below ``node`` that was written, parameters of typed nodes included, in the order of the
    schema.
    """
    for name, info in type(node).model_fields.items():
        if name not in node.model_fields_set:
            continue
        key, value = f"{prefix}{info.alias or name}", getattr(node, name)
        there = isinstance(default, BaseModel) and name in type(default).model_fields
        usual = getattr(default, name) if there else info.get_default()
        if isinstance(value, Node | TypedNode):
            yield from written(value, usual, f"{key}.")
        else:
            yield Written(key, value, usual)
    for name, value in (node.model_extra or {}).items():
        yield Written(f"{prefix}{name}", value)


def unread(
    config: BaseModel, table: Iterable[Reads[S]], setting: S, wrong: Collection[str]
) -> tuple[list[Problem], list[str]]:
    """Return a problem for each key of ``config`` that nothing reads in this setting, and a note for those that may
    stay.

    Of keys that are ``wrong`` anyway nothing more is said. A key of several lines is read where all of them hold; one
    that stands in no line, by every run.
    """
    problems: list[Problem] = []
    noted: dict[str, list[str]] = {}
    lines = tuple(table)
    for key in (found for found in written(config) if found.changes and found.key not in wrong):
        failing = next((line for line in lines if line.names(key.key) and not line.where(setting)), None)
        if failing is None:
            continue
        if failing.noted:
            noted.setdefault(failing.why(setting), []).append(key.key)
        else:
            value = key.value if isinstance(key.value, str | int | float | None) else "..."
            problems.append(Problem(key.key, value, failing.why(setting), failing.remedy))
    return problems, [_note(keys, reason) for reason, keys in noted.items()]


def _note(keys: Sequence[str], reason: str) -> str:
    return f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not used: {reason}"
