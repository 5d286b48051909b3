"""Supervised fine-tuning: examples in, a tuned model out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.base.errors import ContractError, TandemError
from tandem.base.run_folder import FINAL_FOLDER, owned
from tandem.base.seeding import derive_seed
from tandem.config.schema import SftConfig
from tandem.data.base_source import BaseDataSource, as_examples
from tandem.data.examples import Example
from tandem.data.length import Overlong
from tandem.data.sampler import Sampler
from tandem.models.loading import save_pretrained_atomic
from tandem.observe.metrics import METRICS_FILE
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.plan.sft import refuse_ignored
from tandem.roles.examples import padded_batch
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
        refuse_ignored(self.config)
        data, trainer = self.config.data, self.config.trainer
        examples = self._examples(data_source)
        steps = examples.total_steps(data.train_batch_size, trainer.total_steps)
        updater = Updater(self.model.parameters(), self.config.optim, steps)
        folder = Path(trainer.output_dir)
        final, info = folder / FINAL_FOLDER, RunInfo(folder, steps, None, self.config.model_dump(mode="json"))
        with owned(folder), RunLog(info, trainer.logger) as log:
            self.model.train()
            for step in range(1, steps + 1):
                with log.timed("train"):
                    loss = self.compute_loss(padded_batch(examples.take(data.train_batch_size), self._pad_id))
                    loss.backward()
                    result = updater.step()
                rates = {"grad/norm": result.grad_norm, "optim/lr": result.lr, "updates": float(result.updates)}
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

    def _examples(self, data_source: BaseDataSource) -> Sampler[Example]:
        data, trainer = self.config.data, self.config.trainer
        rows: Sequence[Example] = as_examples(
            data_source.get_train_dataset(),
            tokenizer=self.tokenizer,
            max_length=data.max_length,
            on_overlong=Overlong(data.on_overlong),
        )
        epochs = 1 if trainer.total_epochs is None and trainer.total_steps is None else trainer.total_epochs
        return Sampler(rows, seed=derive_seed(trainer.seed, "data"), shuffle=data.shuffle, epochs=epochs)


def require_updates(updates: int, steps: int) -> None:
    """Refuse to call a run done that changed no weight. Raises ``TandemError``."""
    if updates == 0:
        raise TandemError(
            f"nothing was learned: not one optimizer step was applied in {steps} steps. {METRICS_FILE} says why "
            "(grad/norm, optim/skipped_steps; in RL also reward/std and reward/excluded)"
        )


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
