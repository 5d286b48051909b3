"""The parts of a fine-tuning run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.errors import ConfigError, DataError
from tandem.config.schema import NewModelConfig, SftConfig, SftDataConfig, SftModelConfig
from tandem.data.base_source import BaseDataSource, as_rows
from tandem.data.chat import encode_chat_prompt
from tandem.data.examples import Example
from tandem.data.files import open_tables
from tandem.data.mixture import Mixture, Stream
from tandem.data.pictures import Shown, Sight
from tandem.data.rows import Row, RowError, Table
from tandem.data.shown import with_images
from tandem.data.tools import read_tools
from tandem.models.causal_lm import CausalLM
from tandem.models.chat_template import set_template
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.numerics import prepare_process
from tandem.models.token_ids import TokenIds
from tandem.models.tokenizer import character_tokenizer, encode_plain
from tandem.observe.progress import shows_start
from tandem.observe.run_log import RunLog
from tandem.plan.checks.run.resumed import beyond_the_end
from tandem.plan.checks.run.trainer import check_schedule
from tandem.plan.resumed import settings_of
from tandem.roles.accuracy import greedy_accuracy
from tandem.roles.examples import as_samples
from tandem.roles.rollout.generation import end_tokens
from tandem.rollout.hf import HfEngine
from tandem.runtime.build.composite import load_trainable, model_tokenizer
from tandem.runtime.build.engine_specs import run_device
from tandem.runtime.build.sources import example_sight, example_source, held_out_examples, rows_of, user_source
from tandem.session.keep.exports import Exporter
from tandem.session.progress import Progress, StepPart
from tandem.session.resume import check_inputs, find_checkpoint, run_info
from tandem.session.run import Run
from tandem.train import checkpoint
from tandem.train.checkpoint import Checkpoint
from tandem.train.engine import FsdpEngine
from tandem.train.objective import SftObjective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Question:
    """A held-out prompt and its answer."""

    ids: list[int]
    answer: str
    shown: Shown | None = None


@dataclass(frozen=True)
class SftSession:
    """The parts of a fine-tuning run.

    ``draw`` gives the next batch, ``tuner`` learns from it. ``nothing_left``: why a resumed run has nothing to do.
    """

    run: Run
    source: Stream[Example]
    draw: Callable[[], Sequence[Example]]
    tuner: Tuner
    nothing_left: str | None = None


class Drawn(StepPart):
    """Where the data stand, and the accuracy that ended the run, for one that goes on."""

    def __init__(self, source: Stream[Example], goal: float | None) -> None:
        self._source, self._goal = source, goal
        self._reached: float | None = None

    def enough(self, evaluated: Mapping[str, float]) -> bool:
        """Return whether the accuracy that was asked for is reached."""
        found = evaluated.get("eval/accuracy")
        self._reached = found if found is not None and self._goal is not None and found >= self._goal else None
        return self._reached is not None

    def metrics(self, batch: Sequence[Example], step: int) -> dict[str, float]:
        """Return the examples drawn so far from each part of a mix."""
        drawn = self._source.drawn if isinstance(self._source, Mixture) else {}
        return {f"data/{name}": float(count) for name, count in drawn.items()}

    def facts(self, step: int) -> dict[str, Any]:
        return {"data": self._source.state_dict(), "reached": self._reached}


@dataclass(frozen=True)
class Tuner:
    """The packed and token-budgeted engine of a fine-tuning run, and its looks at held-out rows.

    ``held_out``: the examples of the held-out loss; ``questions`` to answer, none where rows are conversations.
    """

    config: SftConfig
    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    engine: FsdpEngine
    log: RunLog
    held_out: Sequence[Example]
    questions: Sequence[Question]

    def learn(self, examples: Sequence[Example]) -> dict[str, float]:
        """Take one optimizer step on the examples; its metrics."""
        batch, objective = as_samples(examples), SftObjective()
        denominator = objective.denominator(batch)
        total = self.engine.forward_backward(batch, objective)
        result = self.engine.optim_step(denominator)
        return {
            "loss/sft": float(total.loss) / denominator,
            "grad/norm": result.grad_norm,
            "optim/lr": result.lr,
            "optim/applied": float(result.applied),
            "optim/skipped_steps": float(result.skipped),
            "updates": float(result.updates),
        }

    def save(self, root: Path, step: int, *, facts: Mapping[str, Any], keep: int, parts: Mapping[str, Path]) -> object:
        """Write a checkpoint of the model, its optimizer and its progress under ``root``."""
        return checkpoint.save(
            root, step, tensors={"model": self.engine.state_dict()}, facts=dict(facts), keep=keep, parts=parts
        )

    def evaluate(self) -> dict[str, float]:
        """Return ``eval/loss`` (per learned token) of the held-out rows, and ``eval/accuracy`` where they are
        questions.
        """
        with self.log.timed("evaluation"):
            metrics = {"eval/loss": self._held_out_loss()}
            if self.questions:
                metrics["eval/accuracy"] = self._accuracy()
                self.log.summarize(accuracy=metrics["eval/accuracy"])
        return metrics

    def _held_out_loss(self) -> float:
        size, objective = self.config.data.train_batch_size, SftObjective()
        total = tokens = 0.0
        for start in range(0, len(self.held_out), size):
            batch = as_samples(self.held_out[start : start + size])
            total -= float(self.engine.forward(batch, ["logprobs"])["logprobs"].values.double().sum())
            tokens += objective.denominator(batch)
        return total / tokens

    def _accuracy(self) -> float:
        """Return the fraction of held-out prompts that the model answers exactly."""
        shown = [question.shown for question in self.questions]
        return greedy_accuracy(
            HfEngine(self.model, shares_weights=True),
            [(question.ids, question.answer) for question in self.questions],
            self.tokenizer,
            max_new_tokens=self.config.evaluation.max_new_tokens,
            stop_token_ids=end_tokens(self.model.model, self.tokenizer),
            images=lambda number: None if (found := shown[number]) is None else found.patches(),
        )


@shows_start
def build_sft_session(config: SftConfig) -> SftSession:
    """Read the data, then make or load the model. Raises ``DataError`` and ``ConfigError`` as they are found."""
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    check_inputs(config)
    resumed = find_checkpoint(config.trainer)
    new = config.model.new
    tokenizer = model_tokenizer(config.model, config.data) if new is None else _new_tokenizer(new, config.data)
    own = None if config.data.source is None else user_source(config.data.source)
    source = example_source(config, tokenizer, own)
    held_out = _held_out_tables(config, own) if config.evaluation.interval else []
    examples = held_out_examples(config, tokenizer, held_out) if held_out else []
    asked = config.data.messages_key is None
    sight = example_sight(config)
    questions = [_question(row, config, tokenizer, sight) for row in _rows(held_out)] if asked else []
    steps = source.total_steps(config.data.train_batch_size, config.trainer.total_steps)
    problems = list(check_schedule("optim", config.optim, steps))
    if problems:
        raise ConfigError(problems)
    reached = None if resumed is None else _continue_from(resumed, source, steps)
    model = load_trainable(config.model, tokenizer, config.trainer.seed) if new is None else _new(config, tokenizer)
    engine = FsdpEngine(
        model,
        optim=config.optim,
        total_updates=steps,
        max_tokens_per_micro_batch=config.data.max_token_len_per_gpu,
        temperature=1.0,
        gradient_checkpointing=config.model.gradient_checkpointing,
        device=run_device(config.runtime),
    )
    first = 0 if resumed is None else _restore(resumed, engine)
    info = run_info(config.trainer, config, steps, resumed)
    log = RunLog(info, config.trainer.logger, trace=config.trainer.trace)
    if resumed is not None:
        resumed.restore_random_state()  # last: what was built here has drawn
    tuner = Tuner(config, model, tokenizer, engine, log, examples, questions)
    goal = config.evaluation.stop_at_accuracy
    drawn, nothing_left = Drawn(source, goal), _nothing_left(goal, reached, first, steps)
    run = Run(
        config.trainer,
        log,
        Progress(first, steps, over=nothing_left is not None),
        info.output_dir,
        Exporter(config.model, config.trainer, model, tokenizer, engine.export),
        tuner.save,
        parts=(drawn,),
        interval=config.evaluation.interval,
        look=tuner.evaluate,
        enough=drawn.enough,
        settings=settings_of(config, steps),
    )
    draw = partial(source.take, config.data.train_batch_size)
    return SftSession(run, source, draw, tuner, nothing_left)


def _nothing_left(goal: float | None, reached: float | None, first: int, last: int) -> str | None:
    """Return why a resumed run has nothing to do; None where it has."""
    if goal is not None and reached is not None and reached >= goal:
        reached_goal = f"the accuracy of {goal:g} that was asked for was reached at step {first} ({reached:g})"
        return f"{reached_goal}; raise evaluation.stop_at_accuracy, or leave it out, to go on"
    if first >= last:
        return f"all {last} steps are done; raise trainer.total_steps or trainer.total_epochs to go on"
    return None


def _continue_from(saved: Checkpoint, source: Stream[Example], last: int) -> float | None:
    """Put the data where the checkpoint has them; the accuracy that ended the saved steps."""
    if saved.step > last:
        raise ConfigError([beyond_the_end(saved.step, last, str(saved.path))])
    facts = saved.read()
    source.load_state_dict(facts["data"])
    reached: float | None = facts["reached"]
    return reached


def _restore(saved: Checkpoint, engine: FsdpEngine) -> int:
    """Put model and optimizer where the checkpoint has them; the steps done."""
    tensors = {"model": engine.state_dict()}
    saved.load_tensors(tensors)
    engine.load_state_dict(tensors["model"])
    return saved.step


def _new_tokenizer(new: NewModelConfig, data: SftDataConfig) -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer(new.alphabet, eos=new.alphabet[0])
    tokenizer.chat_template = new.chat_template
    return set_template(tokenizer, data.chat_template, data.chat_template_kwargs)


def _new(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> CausalLM:
    new = config.model.new
    assert new is not None
    fresh = new_model(llama_shape(config.model, tokenizer), seed=config.trainer.seed)
    return as_causal_lm(fresh, tokens=TokenIds.of(tokenizer))


def llama_shape(model: SftModelConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return the ``config.json`` of the fresh Llama that ``model.new`` describes.

    The MLP is 8/3 as wide as the hidden size; weights start with the spread of ``nn.Linear``'s own initialisation,
    since the 0.02 that large models use makes a narrow one slow to learn.
    """
    new = model.new
    assert new is not None
    return {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": new.hidden_size,
        "intermediate_size": new.hidden_size * 8 // 3 // 8 * 8,
        "num_hidden_layers": new.num_layers,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_heads,
        "max_position_embeddings": new.max_position_embeddings,
        "initializer_range": (3 * new.hidden_size) ** -0.5,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }


def _question(row: Row, config: SftConfig, tokenizer: PreTrainedTokenizerBase, sight: Sight | None) -> Question:
    data = config.data
    prompt, response = row[data.prompt_key], row[data.response_key]
    if not isinstance(prompt, str) or not isinstance(response, str) or not prompt:
        raise row.bad("not text", f"{data.prompt_key!r} and {data.response_key!r} must be text, the first not empty")
    try:
        if data.chat:
            tools, messages = read_tools(row, data.tools_key), [{"role": "user", "content": prompt}]
            if sight is None:
                return Question(encode_chat_prompt(tokenizer, messages, tools=tools)[1], response)
            messages, pictures = with_images(sight, row, messages)
            ids = encode_chat_prompt(tokenizer, messages, tools=tools)[1]
            ids, _ = sight.expanded(ids, [0] * len(ids), pictures)
            return Question(ids, response, Shown(pictures, sight.reader))
        return Question(encode_plain(tokenizer, prompt), response)
    except RowError:
        raise
    except DataError as error:
        raise row.bad("not encodable", str(error)) from error


def _held_out_tables(config: SftConfig, own: BaseDataSource | None) -> Sequence[Table]:
    """Open the held-out rows. Raises ``DataError`` where an evaluation is asked for and there are none."""
    data = config.data
    tables: list[Table] = open_tables(data.val_files, keep_nulls=data.keep_nulls) if data.val_files else []
    if data.source is not None and own is not None:
        rows = rows_of(own.get_val_dataset, data.source.type)
        name = f"{data.source.type}.get_val_dataset()"
        if rows is not None:
            tables.append(as_rows(rows, name=name, split="validation", keep_nulls=data.keep_nulls))
    if not tables:
        raise DataError(
            "evaluation.interval is set, but there are no held-out rows: name data.val_files, or set it to 0"
        )
    return tables


def _rows(tables: Sequence[Table]) -> Iterator[Row]:
    """Yield all rows. Raises the error of the first that can't be read."""
    for table in tables:
        for row in table.scan():
            if not isinstance(row, Row):
                raise row
            yield row
