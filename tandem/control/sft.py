"""Supervised fine-tuning: examples in, a tuned model out."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.base.errors import ContractError
from tandem.base.run_folder import FINAL_FOLDER, owned
from tandem.base.seeding import derive_seed
from tandem.config.schema import SftConfig
from tandem.data.base_source import BaseDataSource, as_examples
from tandem.data.catalog import OnBadRow
from tandem.data.examples import Example
from tandem.data.length import Overlong
from tandem.data.mixture import Counted, rows_told
from tandem.models.loading import save_pretrained_atomic
from tandem.models.numerics import prepare_process
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.plan.mix import example_columns
from tandem.plan.sft import check_own_trainer
from tandem.roles.examples import padded_batch
from tandem.session.idle import IdleSteps, require_updates
from tandem.session.sft_session import SftSession
from tandem.train.updater import Updater


class BaseTrainer:
    """A fine-tuning loop around a loss of yours: subclass it, set ``model`` and ``tokenizer``, call ``fit``.

    ``compute_loss`` gets padded batches (``input_ids``, ``attention_mask``, ``labels``: (B, L) int64) and returns a
    scalar to minimise; the default is the model's own cross-entropy. Sampler, schedule, clipping, logging and saving
    follow the config.
    """

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase

    def __init__(self, config: SftConfig) -> None:
        self.config = config

    def compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a padded batch."""
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
        if rows := rows_told(examples, data.train_batch_size, steps):
            print(f"data: {rows}")
        updater = Updater(self.model.parameters(), self.config.optim, steps)
        folder = Path(trainer.output_dir)
        final, info = folder / FINAL_FOLDER, RunInfo(folder, steps, None, self.config.model_dump(mode="json"))
        with owned(folder), RunLog(info, trainer.logger, trace=trainer.trace) as log:
            idle = IdleSteps()
            self.model.train()
            for step in range(1, steps + 1):
                with log.timed("train"):
                    batch = padded_batch(examples.take(data.train_batch_size), self._pad_id)
                    loss = self.compute_loss({name: x.to(self.model.device) for name, x in batch.items()})
                    loss.backward()
                    result = updater.step()
                rates = {"grad/norm": result.grad_norm, "optim/lr": result.lr, "updates": float(result.updates)}
                idle.note(step, result.applied, f"its gradient norm is {result.grad_norm:g}", trainer.max_idle_steps)
                log.log(step, {"loss/sft": float(loss.detach()), **rates})
            self.model.eval()
            save_pretrained_atomic(self.model, self.tokenizer, final)
            log.summarize(model=str(final))
        require_updates(updater.updates, steps)
        return final

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


def tune(session: SftSession) -> None:
    """The built-in loop, packed and token-budgeted: one optimizer step per batch of examples.

    It ends with the steps, or once the held-out accuracy that was asked for is reached.
    """
    for step in session.steps():
        batch = session.draw()
        with session.log.timed("train"):
            update = session.update(batch)
        if session.record(step, update):
            break
