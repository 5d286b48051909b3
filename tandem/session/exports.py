"""What a run leaves of the model that it trains: a Hugging Face folder, or its adapters as PEFT keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem.base.manifest import MANIFEST, verify
from tandem.config.model import ModelConfig
from tandem.config.schema import TrainerConfig
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.adapters import save_adapter
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import check_weight_files, save_pretrained_atomic
from tandem.train.protocol import Exported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"
"""Inside a checkpoint."""

FINAL_FOLDER = "final"
"""Inside the folder of a run: what it leaves."""

Export = Callable[[Exported], Iterable[tuple[str, torch.Tensor]]]


class Exporter:
    """Writes ``model`` with the weights that ``export`` gives, in the forms that the config asks for."""

    def __init__(
        self,
        config: ModelConfig,
        trainer: TrainerConfig,
        model: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        export: Export,
    ) -> None:
        self._config, self._trainer = config, trainer
        self._model, self._tokenizer, self._export = model, tokenizer, export

    def write(self, folder: Path) -> None:
        """The form that ``trainer.export`` names."""
        if self._trainer.export == "adapter":
            self._write_adapter(folder)
        else:
            weights = dict(self._export("merged"))
            save_pretrained_atomic(self._model, self._tokenizer, folder, weights=weights)

    def write_parts(self, root: Path) -> dict[str, Path]:
        """For a checkpoint: the name of each part and where under ``root`` it was written.

        An adapter is small, so it is always there; the model with it merged is not where ``trainer.export`` is adapter.
        """
        parts: dict[str, Path] = {}
        if self._config.trains_adapters:
            parts[ADAPTER_FOLDER] = root / f".{ADAPTER_FOLDER}.partial"
            self._write_adapter(parts[ADAPTER_FOLDER])
        if self._trainer.export == "merged":
            parts[MODEL_FOLDER] = root / f".{MODEL_FOLDER}.partial"
            self.write(parts[MODEL_FOLDER])
        return parts

    def _write_adapter(self, folder: Path) -> None:
        spec = AdapterSpec.of(self._config, self._trainer.seed)
        assert spec is not None  # the plan sees to that
        weights = dict(self._export("adapter"))
        save_adapter(weights, spec, folder, base=self._config.path, tokenizer=self._tokenizer)


def require_undamaged(source: Path, saved: Path) -> None:
    """Raise ``DataError`` with the file that isn't as written; of a folder without checksums, what its sizes tell."""
    check_weight_files(source)
    if (source / MANIFEST).exists():
        verify(source, own_changes=source == saved)
    elif (saved / MANIFEST).exists():
        verify(saved)


def find_export(saved: Path, part: str, mark: str) -> Path | None:
    """The folder in a checkpoint or a run, or itself, that has the file ``mark``."""
    candidates = (saved / part, saved / FINAL_FOLDER, saved)
    return next((folder for folder in candidates if (folder / mark).is_file()), None)
