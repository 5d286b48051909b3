"""The plan of an SFT run: its arithmetic, and every contradiction in its config."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from tandem.base.errors import ConfigError, Problem
from tandem.config.schema import SftConfig
from tandem.models.families import notes_on_families
from tandem.models.layouts.positions import Context
from tandem.plan.checks.model.adapters import check_adapters, check_exported, notes_on_targets
from tandem.plan.checks.model.folder import check_files_of, check_sft_template
from tandem.plan.checks.model.images import check_sft_images, sees
from tandem.plan.checks.model.model import read_checked
from tandem.plan.checks.model.template import check_arguments, notes_on_conversations
from tandem.plan.checks.run.resumed import check_resumed, resume_notes
from tandem.plan.checks.run.run_folder import find_resumed
from tandem.plan.checks.run.trainer import check_hidden, check_kept, check_schedule, check_trainer, note_on_repeats
from tandem.plan.checks.samples.data import check_sft_data
from tandem.plan.files.mix import MixShare, mix_names
from tandem.plan.files.model import ModelFacts
from tandem.plan.files.rows import count_rows
from tandem.plan.reads.form import unread
from tandem.plan.reads.own_trainer import TRAINER_READS
from tandem.plan.reads.sft import READS, SftSetting


@dataclass(frozen=True)
class SftPlan:
    """``rows`` are the examples of one epoch and ``updates`` the optimizer steps; None where they can't be counted.

    ``mix`` is empty where the examples come from one data set.
    """

    rows: int | None
    mix: tuple[MixShare, ...]
    batch_examples: int
    updates: int | None
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def runs(self) -> bool:
        """Whether a run may start here."""
        return not self.problems

    def to_json(self) -> str:
        """Return the whole plan for machines; values that JSON lacks are written as text."""
        shown = replace(self, problems=tuple(problem.hidden() for problem in self.problems))
        return json.dumps({"kind": "sft", **asdict(shown)}, default=repr, ensure_ascii=False, indent=2)

    def require_runnable(self) -> None:
        """Raise ``ConfigError`` with all problems, if there are any."""
        if not self.runs:
            raise ConfigError(list(self.problems))


def compile_sft_plan(config: SftConfig) -> SftPlan:
    """Return the plan of an SFT run. Pure and deterministic."""
    mix = _shares(config)
    rows = count_rows(config.data.train_files) if config.data.train_files else _all_rows(mix)
    facts, problems = (None, []) if config.model.new is not None else read_checked("model", config.model, sees=True)
    updates = _updates(config, rows)
    saved, resume_problems = find_resumed(config.trainer)
    found = [*check_hidden(config), *problems, *_contradictions(config, facts), *resume_problems]
    found += [] if saved is None else check_resumed(config, saved, updates)
    if updates == 0 and rows:
        reason = (
            f"there are {rows} examples, fewer than one update needs in all epochs together: nothing would be tuned"
        )
        found.append(Problem("data.train_batch_size", config.data.train_batch_size, reason, f"Write at most {rows}"))
    elif rows != 0:
        found += check_schedule("optim", config.optim, updates)
    ignored, unused = unread(config, READS, SftSetting(config), wrong={problem.key for problem in found})
    slower = () if facts is None else notes_on_families(facts.families, generates=config.evaluation.interval > 0)
    resumed = () if saved is None else resume_notes(config, saved, updates)
    left_out = notes_on_targets(config.model, facts)
    repeats = note_on_repeats(config.data.train_batch_size, rows, "examples") if rows and updates != 0 else ()
    notes = (*repeats, *resumed, *unused, *notes_on_conversations(config), *slower, *left_out)
    return SftPlan(rows, mix, config.data.train_batch_size, updates, notes, (*found, *ignored))


def _shares(config: SftConfig) -> tuple[MixShare, ...]:
    parts, names = config.data.mix, mix_names(config.data)
    whole = sum(part.weight for part in parts)
    return tuple(
        MixShare(name, part.weight / whole, count_rows(part.files) if part.files else 0)
        for name, part in zip(names, parts, strict=True)
    )


def _all_rows(mix: tuple[MixShare, ...]) -> int | None:
    """Count the rows of all parts together; None where there are none, or one part's can't be counted."""
    rows = [part.rows for part in mix if part.rows is not None]
    return sum(rows) if mix and len(rows) == len(mix) else None


def _updates(config: SftConfig, rows: int | None) -> int | None:
    trainer, batch = config.trainer, config.data.train_batch_size
    epochs = 1 if trainer.total_epochs is None and trainer.total_steps is None else trainer.total_epochs
    if epochs is None:
        return trainer.total_steps
    if rows is None:
        return None
    from_data = epochs * rows // batch
    return from_data if trainer.total_steps is None else min(from_data, trainer.total_steps)


def _contradictions(config: SftConfig, facts: ModelFacts | None) -> Iterator[Problem]:
    data, model = config.data, config.model
    yield from check_sft_data(config, sees(facts))
    yield from check_sft_images(config, facts)
    if facts is not None:
        yield from check_files_of("model", model)
    yield from check_sft_template(config)
    yield from check_arguments(config)
    yield from check_trainer(config.trainer, config)
    by = ["eval/loss", *(["eval/accuracy"] if data.messages_key is None else [])]
    yield from check_kept(config.trainer, config.evaluation.interval > 0, by)
    yield from check_adapters("model", model, facts)
    yield from check_exported(config.trainer, model)
    if model.new is not None and model.trains_adapters:
        key = "lora_rank" if model.lora_rank else "adapter_path"
        yield Problem(
            f"model.{key}", getattr(model, key), "a new model has learned nothing that could be kept", "Leave it out"
        )
    if model.new is not None and model.path:
        yield Problem("model.new", "...", "the model is loaded from model.path already", "Keep one of the two")
    if model.new is not None and model.new.hidden_size % model.new.num_heads:
        reason = f"the hidden size of {model.new.hidden_size} can't be cut into so many heads"
        yield Problem("model.new.num_heads", model.new.num_heads, reason, "Write a divisor of hidden_size")
    elif model.new is not None and model.new.hidden_size // model.new.num_heads % 2:
        reason = f"a head of {model.new.hidden_size // model.new.num_heads} can't be rotated, which takes pairs"
        yield Problem("model.new.num_heads", model.new.num_heads, reason, "Write one that makes heads of even size")
    if model.new is not None and len(set(model.new.alphabet)) < len(model.new.alphabet):
        twice = sorted(c for c in set(model.new.alphabet) if model.new.alphabet.count(c) > 1)
        reason = f"a token is one character, and {', '.join(map(repr, twice))} stands there more than once"
        yield Problem("model.new.alphabet", model.new.alphabet, reason, "Write each character once")
    if data.max_token_len_per_gpu < data.max_length:
        reason = (
            f"one example can have {data.max_length} tokens (data.max_length), more than the budget of a micro-batch"
        )
        yield Problem(
            "data.max_token_len_per_gpu", data.max_token_len_per_gpu, reason, f"Write at least {data.max_length}"
        )
    context = facts.context if facts is not None else None
    if model.new is not None:
        context = Context.of({"max_position_embeddings": model.new.max_position_embeddings})
    if context is not None and context.tokens < data.max_length:
        yield Problem("data.max_length", data.max_length, context.why, f"Write at most {context.tokens}")
    if config.evaluation.interval > 0 and not data.val_files and data.source is None:
        reason = "there are no held-out rows to evaluate on"
        yield Problem("evaluation.interval", config.evaluation.interval, reason, "Write data.val_files, or 0")
    goal = config.evaluation.stop_at_accuracy
    if goal is not None and config.evaluation.interval == 0:
        yield Problem("evaluation.stop_at_accuracy", goal, "nothing is evaluated", "Write evaluation.interval: 50")
    elif goal is not None and data.messages_key is not None:
        reason = "held-out conversations have a loss and no accuracy: only a prompt with its response is answered"
        yield Problem("evaluation.stop_at_accuracy", goal, reason, "Leave it out")


def check_own_trainer(config: SftConfig) -> None:
    """Raise ``ConfigError`` for keys that ``BaseTrainer.fit`` ignores; warn of those that may stay."""
    problems, notes = unread(config, (*READS, *TRAINER_READS), SftSetting(config), wrong=())
    if problems:
        raise ConfigError(problems)
    for note in notes:
        warnings.warn(note, stacklevel=3)
