"""The live handles of an SFT run, and what happens around each of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.base.errors import ConfigError, DataError, Problem
from tandem.columns.proto import DataProto
from tandem.config.schema import NewModelConfig, SftConfig, SftModelConfig
from tandem.data.base_source import BaseDataSource, as_rows
from tandem.data.chat import encode_chat_prompt
from tandem.data.examples import Example
from tandem.data.files import open_tables
from tandem.data.mixture import Mixture, Stream
from tandem.data.rows import Row, Table
from tandem.data.tools import read_tools
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.numerics import prepare_process
from tandem.models.tokenizer import character_tokenizer, encode_text, leading_ids
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.roles.accuracy import greedy_accuracy
from tandem.roles.examples import as_samples
from tandem.roles.rollout.generation import end_tokens
from tandem.rollout.hf import HfEngine
from tandem.runtime.build.composite import load_trainable, model_tokenizer, run_device
from tandem.runtime.build.sources import example_source, held_out_examples, rows_of, user_source
from tandem.session.exports import FINAL_FOLDER, Exporter
from tandem.session.stepping import CHECKPOINTS
from tandem.train import checkpoint
from tandem.train.engine import FsdpEngine
from tandem.train.objective import SftObjective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair = tuple[list[int], str]


@dataclass
class SftSession:
    """What the SFT loop needs.

    ``held_out``: the examples of the held-out loss; ``questions``: (prompt ids, response) pairs to answer, none where
    rows are conversations. ``first`` and ``last`` bound the steps; ``reached`` is the accuracy that ended the run.
    """

    config: SftConfig
    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    engine: FsdpEngine
    source: Stream[Example]
    held_out: Sequence[Example]
    questions: Sequence[Pair]
    log: RunLog
    first: int
    last: int
    reached: float | None = None

    def steps(self) -> Iterator[int]:
        """The steps that are left, from 1."""
        yield from range(self.first + 1, self.last + 1) if self.nothing_left is None else ()

    @property
    def nothing_left(self) -> str | None:
        """Why a resumed run has nothing to do; None where it has."""
        goal = self.config.evaluation.stop_at_accuracy
        if goal is not None and self.reached is not None and self.reached >= goal:
            told = f"the accuracy of {goal:g} that was asked for was reached at step {self.first} ({self.reached:g})"
            return f"{told}; raise evaluation.stop_at_accuracy, or leave it out, to go on"
        if self.first >= self.last:
            return f"all {self.last} steps are done; raise trainer.total_steps or trainer.total_epochs to go on"
        return None

    def draw(self) -> DataProto:
        """The next batch of examples."""
        return as_samples(self.source.take(self.config.data.train_batch_size))

    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on ``batch``."""
        objective = SftObjective()
        denominator = objective.denominator(batch)
        total = self.engine.forward_backward(batch, objective)
        result = self.engine.optim_step(denominator)
        return {
            "loss/sft": float(total.loss) / denominator,
            "grad/norm": result.grad_norm,
            "optim/lr": result.lr,
            "optim/skipped_steps": float(result.skipped),
            "updates": float(result.updates),
            **{f"data/{name}": float(count) for name, count in self._drawn().items()},
        }

    def _drawn(self) -> dict[str, int]:
        """Examples drawn so far from each part of a mix."""
        return self.source.drawn if isinstance(self.source, Mixture) else {}

    def record(self, step: int, update: dict[str, float]) -> bool:
        """Evaluate where due, log the step, save where due. Says whether the wanted accuracy is reached."""
        evaluation, save = self.config.evaluation, self.config.trainer.save_interval
        goal, self.reached = evaluation.stop_at_accuracy, None
        if evaluation.interval and (step % evaluation.interval == 0 or step == self.last):
            update = update | self.evaluate()
            if goal is not None and update["eval/accuracy"] >= goal:
                self.reached = update["eval/accuracy"]
        self.log.log(step, update)
        reached = self.reached is not None
        if save and (step % save == 0 or step == self.last or reached):
            root = Path(self.config.trainer.output_dir) / CHECKPOINTS
            checkpoint.save(
                root,
                step,
                tensors={"model": self.engine.state_dict()},
                facts={"data": self.source.state_dict(), "reached": self.reached},
                keep=self.config.trainer.keep_checkpoints,
                parts=self.exporter.write_parts(root),
            )
        return reached

    def evaluate(self) -> dict[str, float]:
        """``eval/loss`` (per learned token) of the held-out rows, and ``eval/accuracy`` where they are questions."""
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
        """The fraction of held-out prompts that the model answers exactly."""
        return greedy_accuracy(
            HfEngine(self.model, shares_weights=True),
            self.questions,
            self.tokenizer,
            max_new_tokens=self.config.evaluation.max_new_tokens,
            stop_token_ids=end_tokens(self.model.model, self.tokenizer),
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a whole run: the model is saved at its end, the report is written whatever happens."""
        final = Path(self.config.trainer.output_dir) / FINAL_FOLDER
        with self.log:
            yield
            self.exporter.write(final)
            self.log.summarize(model=str(final))

    @property
    def exporter(self) -> Exporter:
        """What writes the model."""
        return Exporter(self.config.model, self.config.trainer, self.model, self.tokenizer, self.engine.export)


def build_sft_session(config: SftConfig) -> SftSession:
    """Read the data, then make or load the model. Raises ``DataError`` and ``ConfigError`` as they are found."""
    prepare_process(threads=config.runtime.torch_threads, exact=config.trainer.exact)
    new = config.model.new
    tokenizer = model_tokenizer(config.model) if new is None else _new_tokenizer(new)
    own = None if config.data.source is None else user_source(config.data.source)
    source = example_source(config, tokenizer, own)
    held_out = _held_out_tables(config, own) if config.evaluation.interval else []
    examples = held_out_examples(config, tokenizer, held_out) if held_out else []
    asked = config.data.messages_key is None
    questions = [_pair(row, config, tokenizer) for row in _rows(held_out)] if asked else []
    steps = source.total_steps(config.data.train_batch_size, config.trainer.total_steps)
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
    first, reached = _resume(config, engine, source, steps)
    output_dir = Path(config.trainer.output_dir)
    checkpoint.set_aside(output_dir / CHECKPOINTS, first)
    info = RunInfo(output_dir, steps, first if first else None, config.model_dump(mode="json"))
    log = RunLog(info, config.trainer.logger, trace=config.trainer.trace)
    return SftSession(config, model, tokenizer, engine, source, examples, questions, log, first, steps, reached)


def _resume(config: SftConfig, engine: FsdpEngine, source: Stream[Example], last: int) -> tuple[int, float | None]:
    """Continue from the checkpoint that ``trainer.resume`` names; the steps done, and the accuracy that ended them."""
    resume, root = config.trainer.resume, Path(config.trainer.output_dir) / CHECKPOINTS
    if resume is None:
        return 0, None
    saved = checkpoint.latest(root) if resume == "auto" else checkpoint.open_checkpoint(Path(resume))
    if saved is None:
        return 0, None
    if saved.step > last:
        reason = f"the checkpoint is of step {saved.step}, the run ends at step {last}"
        raise ConfigError([Problem("trainer.resume", str(saved.path), reason, "Raise trainer.total_steps")])
    facts = saved.read()
    source.load_state_dict(facts["data"])
    tensors = {"model": engine.state_dict()}
    saved.load_tensors(tensors)
    engine.load_state_dict(tensors["model"])
    return saved.step, facts["reached"]


def _new_tokenizer(new: NewModelConfig) -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer(new.alphabet, eos=new.alphabet[0])
    tokenizer.chat_template = new.chat_template
    return tokenizer


def _new(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> CausalLM:
    new = config.model.new
    assert new is not None
    return as_causal_lm(new_model(llama_shape(config.model, tokenizer), seed=config.trainer.seed))


def llama_shape(model: SftModelConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The ``config.json`` of the fresh Llama that ``model.new`` describes.

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


def _pair(row: Row, config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> Pair:
    data = config.data
    prompt, response = row[data.prompt_key], row[data.response_key]
    if not isinstance(prompt, str) or not isinstance(response, str) or not prompt:
        raise row.bad("not text", f"{data.prompt_key!r} and {data.response_key!r} must be text, the first not empty")
    try:
        if data.chat:
            tools = read_tools(row, data.tools_key)
            return encode_chat_prompt(tokenizer, [{"role": "user", "content": prompt}], tools=tools)[1], response
        return leading_ids(tokenizer) + encode_text(tokenizer, prompt), response
    except DataError as error:
        raise row.bad("not encodable", str(error)) from error


def _held_out_tables(config: SftConfig, own: BaseDataSource | None) -> Sequence[Table]:
    """The held-out rows. Raises ``DataError`` where an evaluation is asked for and there are none."""
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
    """All rows. Raises the error of the first that can't be read."""
    for table in tables:
        for row in table.scan():
            if not isinstance(row, Row):
                raise row
            yield row
