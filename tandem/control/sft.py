"""Supervised fine-tuning: examples in, a tuned model out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from tandem.base.errors import ContractError
from tandem.base.interrupts import unwinding
from tandem.base.run_folder import FINAL_FOLDER, owned
from tandem.base.seeding import derive_seed
from tandem.config.schema import SftConfig
from tandem.data.base_source import BaseDataSource, as_examples
from tandem.data.catalog import OnBadRow
from tandem.data.examples import Example
from tandem.data.length import Overlong
from tandem.data.mixture import Counted, rows_in_words
from tandem.models.lora import Tuned
from tandem.models.numerics import prepare_process
from tandem.observe.run_log import RunLog
from tandem.plan.files.mix import example_columns
from tandem.plan.sft import check_own_trainer
from tandem.roles.examples import padded_batch
from tandem.session.idle import require_updates
from tandem.session.keep.exports import PlainExport
from tandem.session.progress import Progress
from tandem.session.resume import run_info
from tandem.session.run import Run
from tandem.stages.table import train
from tandem.train.updater import Updater


class BaseTrainer:
    """A fine-tuning loop around a loss of yours: subclass it, set ``model`` and ``tokenizer``, call ``fit``.

    ``compute_loss`` gets padded batches (``input_ids``, ``attention_mask``, ``labels``: (B, L) int64) and returns a
    scalar to minimise; the default is the model's own cross-entropy. Sampler, schedule, clipping, logging and saving
    follow the config.
    """

    model: Tuned
    tokenizer: PreTrainedTokenizerBase

    def __init__(self, config: SftConfig) -> None:
        self.config = config

    def compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a padded batch."""
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def fit(self, data_source: BaseDataSource) -> Path:
        """Train on ``data_source`` and save; the folder of the tuned model, adapters included where there are any."""
        if not (hasattr(self, "model") and hasattr(self, "tokenizer")):
            raise ContractError(f"{type(self).__name__}: set self.model and self.tokenizer before fit()")
        check_own_trainer(self.config)
        data, trainer = self.config.data, self.config.trainer
        prepare_process(threads=self.config.runtime.torch_threads, exact=trainer.exact)
        examples = self._examples(data_source)
        steps = examples.total_steps(data.train_batch_size, trainer.total_steps)
        if rows := rows_in_words(examples, data.train_batch_size, steps):
            print(f"data: {rows}")
        updater = Updater(self.model.parameters(), self.config.optim, steps)
        folder = Path(trainer.output_dir)

        def learn(drawn: Sequence[Example]) -> dict[str, float]:
            batch = padded_batch(drawn, self._pad_id)
            loss = self.compute_loss({name: x.to(self.model.device) for name, x in batch.items()})
            loss.backward()
            result = updater.step()
            rates = {"grad/norm": result.grad_norm, "optim/lr": result.lr, "updates": float(result.updates)}
            return {"loss/sft": float(loss.detach()), "optim/applied": float(result.applied), **rates}

        with owned(folder):
            info = run_info(trainer, self.config, steps, None)
            log = RunLog(info, trainer.logger, trace=trainer.trace)
            run = Run(trainer, log, Progress(0, steps), folder, PlainExport(self.model, self.tokenizer))
            with unwinding(lambda: f"{run.progress.step} of {steps} steps are done, and none is kept"), run.running():
                self.model.train()
                fine_tune(run, partial(examples.take, data.train_batch_size), learn)
                self.model.eval()
        require_updates(updater.updates, steps)
        return folder / FINAL_FOLDER

    @property
    def _pad_id(self) -> int:
        pad: int | None = self.tokenizer.pad_token_id
        return 0 if pad is None else pad

    def _examples(self, data_source: BaseDataSource) -> Counted[Example]:
        data, trainer = self.config.data, self.config.trainer
        rows = as_examples(
            data_source.get_train_dataset(),
            tokenizer=self.tokenizer,
            max_length=data.max_length,
            on_overlong=Overlong(data.on_overlong),
            on_bad_row=OnBadRow(data.on_bad_row),
            columns=example_columns(data),
        )
        seed = derive_seed(trainer.seed, "data")
        return Counted.of(rows, seed=seed, shuffle=data.shuffle, epochs=trainer.total_epochs)


def fine_tune(
    run: Run, draw: Callable[[], Sequence[Example]], learn: Callable[[Sequence[Example]], dict[str, float]]
) -> None:
    """Run the loop of fine-tuning, whoever's the loss is: one optimizer step (``learn``) on each batch of examples.

    It waits for nothing, and ends with the steps, or once the held-out accuracy that was asked for is reached.
    """
    for k in run.steps():
        drawn = draw()
        with run.stage(train):
            update = learn(drawn)
        run.end_step(k, drawn, update)
