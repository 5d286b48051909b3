"""The live handles of an SFT run, and what happens around each of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem.base.errors import ConfigError, DataError, Problem
from tandem.columns.proto import DataProto
from tandem.config.schema import SftConfig, SftModelConfig
from tandem.dataflow.base_source import BaseDataSource, as_rows
from tandem.dataflow.chat import encode_chat_prompt
from tandem.dataflow.examples import ConversationSource
from tandem.dataflow.files import open_tables
from tandem.dataflow.rows import Row, Table
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.tokenizer import character_tokenizer, encode_text, leading_ids
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.roles.accuracy import greedy_accuracy
from tandem.roles.examples import as_samples
from tandem.roles.generation import end_tokens
from tandem.rollout.hf import HfEngine
from tandem.topology.composite import load_trainable, model_tokenizer, run_device
from tandem.topology.exports import Exporter
from tandem.topology.session import CHECKPOINTS, FINAL_FOLDER
from tandem.topology.sources import example_source, rows_of, user_source
from tandem.train import checkpoint
from tandem.train.engine import FsdpEngine
from tandem.train.objective import SftObjective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair = tuple[list[int], str]


@dataclass
class SftSession:
    """What the SFT loop needs. ``held_out``: (prompt ids, response) pairs; ``first`` and ``last`` bound the steps."""

    config: SftConfig
    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    engine: FsdpEngine
    source: ConversationSource
    held_out: Sequence[Pair]
    log: RunLog
    first: int
    last: int

    def steps(self) -> Iterator[int]:
        """The steps that are left, from 1."""
        yield from range(self.first + 1, self.last + 1)

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
        }

    def record(self, step: int, update: dict[str, float]) -> bool:
        """Evaluate where due, log the step, save where due. Says whether the wanted accuracy is reached."""
        evaluation, save = self.config.evaluation, self.config.trainer.save_interval
        reached = False
        if evaluation.interval and (step % evaluation.interval == 0 or step == self.last):
            update = update | {"eval/accuracy": self.accuracy()}
            self.log.summarize(accuracy=update["eval/accuracy"])
            goal = evaluation.stop_at_accuracy
            reached = goal is not None and update["eval/accuracy"] >= goal
        self.log.log(step, update)
        if save and (step % save == 0 or step == self.last or reached):
            root = Path(self.config.trainer.output_dir) / CHECKPOINTS
            checkpoint.save(
                root,
                step,
                tensors={"model": self.engine.state_dict()},
                facts={"data": self.source.state_dict()},
                keep=self.config.trainer.keep_checkpoints,
                parts=self.exporter.write_parts(root),
            )
        return reached

    def accuracy(self) -> float:
        """The fraction of held-out prompts that the model answers exactly."""
        engine = HfEngine(self.model, shares_weights=True)
        with self.log.timed("evaluation"):
            return greedy_accuracy(
                engine,
                self.held_out,
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
    if config.runtime.torch_threads is not None:
        torch.set_num_threads(config.runtime.torch_threads)
    new = config.model.new
    tokenizer = model_tokenizer(config.model) if new is None else character_tokenizer(new.alphabet, eos=new.alphabet[0])
    own = None if config.data.source is None else user_source(config.data.source)
    source = example_source(config, tokenizer, own)
    held_out = _held_out(config, tokenizer, own) if config.evaluation.interval else []
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
    first = _resume(config, engine, source, steps)
    output_dir = Path(config.trainer.output_dir)
    checkpoint.set_aside(output_dir / CHECKPOINTS, first)
    info = RunInfo(output_dir, steps, first if first else None, config.model_dump(mode="json"))
    log = RunLog(info, config.trainer.logger, trace=config.trainer.trace)
    return SftSession(config, model, tokenizer, engine, source, held_out, log, first, steps)


def _resume(config: SftConfig, engine: FsdpEngine, source: ConversationSource, last: int) -> int:
    """Continue from the checkpoint that ``trainer.resume`` names; the steps already done."""
    resume, root = config.trainer.resume, Path(config.trainer.output_dir) / CHECKPOINTS
    if resume is None:
        return 0
    saved = checkpoint.latest(root) if resume == "auto" else checkpoint.open_checkpoint(Path(resume))
    if saved is None:
        return 0
    if saved.step > last:
        reason = f"the checkpoint is of step {saved.step}, the run ends at step {last}"
        raise ConfigError([Problem("trainer.resume", str(saved.path), reason, "Raise trainer.total_steps")])
    source.load_state_dict(saved.read()["data"])
    tensors = {"model": engine.state_dict()}
    saved.load_tensors(tensors)
    engine.load_state_dict(tensors["model"])
    return saved.step


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
            return encode_chat_prompt(tokenizer, [{"role": "user", "content": prompt}])[1], response
        return leading_ids(tokenizer) + encode_text(tokenizer, prompt), response
    except DataError as error:
        raise row.bad("not encodable", str(error)) from error


def _held_out(config: SftConfig, tokenizer: PreTrainedTokenizerBase, own: BaseDataSource | None) -> list[Pair]:
    """Held-out rows as pairs, asked as in training. Raises ``DataError`` with the row for one that can't be one."""
    data = config.data
    tables: list[Table] = open_tables(data.val_files) if data.val_files else []
    if data.source is not None and own is not None:
        rows = rows_of(own.get_val_dataset, data.source.type)
        name = f"{data.source.type}.get_val_dataset()"
        tables += [as_rows(rows, name=name, split="validation")] if rows is not None else []
    pairs: list[Pair] = []
    for table in tables:
        for row in table.scan():
            if not isinstance(row, Row):
                raise row
            pairs.append(_pair(row, config, tokenizer))
    if not pairs:
        raise DataError(
            "evaluation.interval is set, but there are no held-out rows: name data.val_files, or set it to 0"
        )
    return pairs
