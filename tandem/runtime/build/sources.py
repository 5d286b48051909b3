"""From the config's ``data`` section to prompts and examples."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.base.errors import ContractError, DataError, sentences
from tandem.base.procedural import RECIPE
from tandem.base.seeding import derive_seed
from tandem.base.user_code import load_class
from tandem.config.schema import Config, DataConfig, SftConfig, SftDataConfig, SourceConfig
from tandem.data.base_source import BaseDataSource, as_rows
from tandem.data.catalog import OnBadRow
from tandem.data.environment_rows import SOURCES
from tandem.data.examples import ConversationSource, Example, ExampleColumns
from tandem.data.files import open_tables
from tandem.data.length import Overlong
from tandem.data.mixture import Mixture, Part, Stream
from tandem.data.pictures import Sight
from tandem.data.preferences import Lengths, Preference, PreferenceColumns, PreferenceSource
from tandem.data.prompts import Prompt, PromptColumns, PromptSource
from tandem.data.rows import Table
from tandem.data.tasks import TaskTable
from tandem.data.tools import Tools
from tandem.plan.files.mix import example_columns, mix_names
from tandem.plan.parts.batch import epochs, name_epochs
from tandem.plan.parts.teacher import taught_sources
from tandem.reward.scoring import describe_error
from tandem.runtime.build.composite import model_tokenizer
from tandem.runtime.build.episodes import offered_tools
from tandem.runtime.build.sight import prompt_sight, sight_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HELD_OUT_TASKS = 256
"""Questions of a procedural task that are held out where ``evaluation.max_prompts`` does not say."""


def user_source(source: SourceConfig) -> BaseDataSource:
    """Load the data source. Raises ``ConfigError`` where the user's file or class can't be used."""
    if source.file is None:
        builtin: Callable[..., BaseDataSource] = SOURCES[source.type]
        return builtin(**source.parameters)
    made = load_class(source.file, source.type, source.parameters, key="data.source")
    if not isinstance(made, BaseDataSource):
        raise DataError(f"data.source: class {source.type} in {source.file} must be a subclass of BaseDataSource")
    return made


def rows_of(method: Callable[[], Any], name: str) -> Any:
    """Call a method of the user's data source. Raises ``DataError`` with whatever it raises."""
    try:
        return method()
    except (Exception, SystemExit) as error:
        raise DataError(
            sentences(f"data.source: {name}.{method.__name__}() fails: {describe_error(error)}", "Mend it")
        ) from error


class Tables(NamedTuple):
    """What is trained on and what is held out. Read together and once: a source of the user's may split by chance."""

    train: Sequence[Table]
    held_out: Sequence[Table]


def prompt_source(
    config: Config, tokenizer: PreTrainedTokenizerBase, tables: Tables, *, endless: bool = False
) -> PromptSource:
    """Open the stream of training prompts; ``endless`` where the caller counts the epochs."""
    data, trainer = config.data, config.trainer
    return PromptSource(
        tables.train,
        tokenizer=tokenizer,
        columns=_prompt_columns(data, offered_tools(config)),
        max_prompt_length=data.max_prompt_length,
        on_overlong=Overlong(data.on_overlong_prompt),
        on_bad_row=OnBadRow(data.on_bad_row),
        seed=derive_seed(trainer.seed, "data"),
        shuffle=data.shuffle,
        epochs=None if endless else epochs(config),
        streaming=data.use_streaming_dataset,
        held_out=tables.held_out if data.drop_val_prompts else (),
        taught=taught_sources(config),
        sight=prompt_sight(config),
    )


def preference_source(config: Config, tokenizer: PreTrainedTokenizerBase, tables: Tables) -> PreferenceSource:
    """Open the stream of preferences to learn from."""
    data, trainer = config.data, config.trainer
    return PreferenceSource(
        tables.train,
        tokenizer=tokenizer,
        columns=_preference_columns(data),
        lengths=_lengths(data),
        on_bad_row=OnBadRow(data.on_bad_row),
        seed=derive_seed(trainer.seed, "data"),
        shuffle=data.shuffle,
        epochs=epochs(config),
        streaming=data.use_streaming_dataset,
        held_out=tables.held_out if data.drop_val_prompts else (),
        sight=prompt_sight(config),
    )


def held_out_preferences(config: Config, tokenizer: PreTrainedTokenizerBase, tables: Tables) -> list[Preference]:
    """Read the preferences of the evaluation, in file order; none where the config names none."""
    if not tables.held_out:
        return []
    data, most = config.data, config.evaluation.max_prompts
    source = PreferenceSource(
        tables.held_out,
        tokenizer=tokenizer,
        columns=_preference_columns(data),
        lengths=_lengths(data),
        on_bad_row=OnBadRow(data.on_bad_row),
        shuffle=False,
        sight=prompt_sight(config),
    )
    return list(source.items[: len(source) if most is None else most])


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one step: P of them."""

    prompts: list[Prompt]


@dataclass
class _Taken:
    """Batches that a loop of the user's has ``taken``, of those that its config ``asked`` for."""

    asked: float
    taken: int = 0

    def report(self) -> None:
        """Print that the loop ended early, if it did."""
        if 0 < self.taken < self.asked:
            print(
                f"data: the loop ended after {self.taken} of {self.asked} steps. One pass over the loader is one "
                "epoch: loop over its steps(), or over range(config.trainer.total_epochs)"
            )


class PromptLoader:
    """Batches of training prompts for a loop of your own: ``steps()`` gives those of the whole run, each iteration over
    the loader itself those of one epoch, in an order of its own.

    An epoch ends with its last whole batch; what is left (``left_over`` prompts) begins the next one. No batch comes
    after the last of ``steps`` (None: the caller counts); a loop that ends with fewer than those, or than ``passes``
    have, is told of when the loader goes. Raises ``DataError`` where the rows make no whole batch.
    """

    def __init__(
        self, source: PromptSource, batch_size: int, steps: int | None = None, passes: int | None = None
    ) -> None:
        if len(source) < batch_size:
            raise DataError(
                f"{len(source)} usable rows give no batch of {batch_size}: lower data.train_batch_size, or add rows"
            )
        self._source, self._batch_size = source, batch_size
        self._most = math.inf if steps is None else steps
        self._steps = self._most if passes is None else min(self._most, passes * len(source) // batch_size)
        # What the rests of several epochs add is for steps() alone.
        self._count = _Taken(self._most if passes is None else min(self._most, passes * len(self)))
        weakref.finalize(self, self._count.report)

    @property
    def left_over(self) -> int:
        """Prompts of an epoch that make no whole batch."""
        return len(self._source) % self._batch_size

    def __str__(self) -> str:
        """Say what became of the rows, in one line."""
        if not self.left_over:
            return str(self._source.counts)
        left = f"{self.left_over} left over in each epoch, less than a batch of {self._batch_size}, begin the next one"
        return f"{self._source.counts}; {left}"

    def __len__(self) -> int:
        """Count the whole batches in one epoch."""
        return len(self._source) // self._batch_size

    def __iter__(self) -> Iterator[PromptBatch]:
        for _ in range(len(self)):
            if self._count.taken >= self._most:
                return
            yield self._next()

    def steps(self) -> Iterator[PromptBatch]:
        """Yield the batches of the run: ``trainer.total_steps``, or what ``trainer.total_epochs`` joined end to end
        make.
        """
        while self._count.taken < self._steps:
            yield self._next()

    def _next(self) -> PromptBatch:
        self._count.taken += 1
        return PromptBatch(self._source.take(self._batch_size))


def build_dataloader(config: Config) -> PromptLoader:
    """Open the training prompts of ``config.data``, encoded by the model's tokenizer; what became of the rows is
    printed.

    Loop over its ``steps()`` for the whole run; a pass over the loader itself is one epoch. With
    ``trainer.total_steps`` no more batches come. Where that is all that bounds the run, ``trainer.total_epochs``
    becomes as many epochs as they take, so that a loop over both needs to know of one of them only.
    """
    if not isinstance(config, Config):
        raise ContractError(f"build_dataloader takes the whole config of a run, got {type(config).__name__}")
    tokenizer = model_tokenizer(config.actor_rollout_ref.model, config.data)
    source, trainer = prompt_source(config, tokenizer, prompt_tables(config), endless=True), config.trainer
    loader = PromptLoader(source, config.data.train_batch_size, trainer.total_steps, epochs(config))
    if trainer.total_steps is not None:
        name_epochs(config, -(-trainer.total_steps // len(loader)))
    if source.counts.dropped or source.counts.cut or loader.left_over:
        print(f"data: {loader}")
    return loader


def held_out_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, tables: Tables) -> list[Prompt]:
    """Read the prompts of the evaluation, in file order; none where the config names none."""
    if not tables.held_out:
        return []
    data = config.data
    source = PromptSource(
        tables.held_out,
        tokenizer=tokenizer,
        columns=_prompt_columns(data, offered_tools(config)),
        max_prompt_length=data.max_prompt_length,
        on_overlong=Overlong(data.on_overlong_prompt),
        on_bad_row=OnBadRow(data.on_bad_row),
        shuffle=False,
        sight=prompt_sight(config),
    )
    most = config.evaluation.max_prompts
    return list(source.items[: len(source) if most is None else most])


def prompt_tables(config: Config) -> Tables:
    """Open the tables to train on and those held out, whichever way the data are given."""
    data = config.data
    if data.source is not None:
        source = user_source(data.source)
        name = data.source.type
        held_out = rows_of(source.get_val_dataset, name)
        keep, named = data.keep_nulls, f"{name}.get_val_dataset()"
        train = as_rows(rows_of(source.get_train_dataset, name), name=f"{name}.get_train_dataset()", keep_nulls=keep)
        val = [] if held_out is None else [as_rows(held_out, name=named, split="validation", keep_nulls=keep)]
        return Tables([train], [*val, *_tables(data, data.val_files)])
    if data.reasoning_gym is not None:
        return Tables([TaskTable(**data.reasoning_gym)], _held_out_task(config, data.reasoning_gym))
    return Tables(open_tables(data.train_files, keep_nulls=data.keep_nulls), _tables(data, data.val_files))


def _tables(data: DataConfig, files: Sequence[str]) -> list[Table]:
    return open_tables(files, keep_nulls=data.keep_nulls) if files else []


def _held_out_task(config: Config, task: dict[str, Any]) -> list[Table]:
    """Make questions of the same task from another seed; those that training shares are left out of the training."""
    most = config.evaluation.max_prompts
    size = _HELD_OUT_TASKS if most is None else most
    seed = derive_seed("held out", *(str(item) for item in sorted(task.items()))) % 2**31
    wanted = config.evaluation.during_run
    return [TaskTable(**{**task, "size": size, "seed": seed})] if wanted else []


def _prompt_columns(data: DataConfig, tools: Tools | None = None) -> PromptColumns:
    procedural = data.reasoning_gym is not None
    return PromptColumns(
        prompt_key="question" if procedural else data.prompt_key,
        answer_key="answer" if procedural else data.answer_key,
        data_source_key=data.data_source_key,
        uid_key=data.uid_key,
        extra_keys=(RECIPE,) if procedural else tuple(data.extra_keys),
        template=data.template,
        chat=data.chat,
        system_prompt=data.system_prompt,
        tools_key=data.tools_key,
        tools=tools,
    )


def _preference_columns(data: DataConfig) -> PreferenceColumns:
    return PreferenceColumns(
        prompt=replace(_prompt_columns(data), answer_key=None, extra_keys=()),
        chosen=data.chosen_key,
        rejected=data.rejected_key,
        label=data.label_key,
        response=data.response_key,
    )


def _lengths(data: DataConfig) -> Lengths:
    return Lengths(
        data.max_prompt_length,
        data.max_response_length,
        Overlong(data.on_overlong_prompt),
        Overlong(data.on_overlong_response),
    )


def example_source(
    config: SftConfig, tokenizer: PreTrainedTokenizerBase, own: BaseDataSource | None
) -> Stream[Example]:
    """Open the stream of SFT examples; ``own`` is the user's source, if the config names one."""
    data, trainer, sight = config.data, config.trainer, example_sight(config)
    passes = 1 if trainer.total_epochs is None and trainer.total_steps is None else trainer.total_epochs
    if data.mix:
        names = mix_names(data)
        parts = []
        for name, part in zip(names, data.mix, strict=True):
            tables = open_tables(part.files, keep_nulls=data.keep_nulls)
            seed = derive_seed(trainer.seed, "data", name)
            draws = _examples(data, tokenizer, tables, example_columns(data, part), sight, seed=seed)
            parts.append(Part(name, part.weight, draws))
        return Mixture(parts, epochs=passes)
    seed, columns = derive_seed(trainer.seed, "data"), example_columns(data)
    return _examples(data, tokenizer, example_tables(config, own), columns, sight, seed=seed, epochs=passes)


def example_sight(config: SftConfig) -> Sight | None:
    """Return how the images of SFT examples are read; None where the model sees none."""
    return None if config.model.new is not None else sight_of(config.model, config.data)


def held_out_examples(
    config: SftConfig, tokenizer: PreTrainedTokenizerBase, tables: Sequence[Table]
) -> Sequence[Example]:
    """Read the rows of ``tables`` as examples, in order."""
    return _examples(config.data, tokenizer, tables, example_columns(config.data), example_sight(config)).items


def example_tables(config: SftConfig, own: BaseDataSource | None) -> Sequence[Table]:
    """Open the tables to tune on, unless they are a mix."""
    data = config.data
    if data.source is None or own is None:
        return open_tables(data.train_files, keep_nulls=data.keep_nulls)
    rows, name = rows_of(own.get_train_dataset, data.source.type), f"{data.source.type}.get_train_dataset()"
    return [as_rows(rows, name=name, keep_nulls=data.keep_nulls)]


def _examples(
    data: SftDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    tables: Sequence[Table],
    columns: ExampleColumns,
    sight: Sight | None,
    *,
    seed: int = 0,
    epochs: int | None = None,
) -> ConversationSource:
    return ConversationSource(
        tables,
        tokenizer=tokenizer,
        columns=columns,
        max_length=data.max_length,
        on_overlong=Overlong(data.on_overlong),
        on_bad_row=OnBadRow(data.on_bad_row),
        seed=seed,
        shuffle=data.shuffle,
        epochs=epochs,
        sight=sight,
    )
