"""What a run leaves of the model that it trains: a Hugging Face folder, or its adapters as PEFT keeps them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from tandem.base.errors import DataError, WriteError, sentences
from tandem.base.folders import whole_folder, write_error
from tandem.base.manifest import MANIFEST, verify, write_manifest
from tandem.base.run_folder import FINAL_FOLDER
from tandem.config.model import ModelConfig
from tandem.config.trainer import TrainerConfig
from tandem.models.adapter_spec import CONFIG as ADAPTER_CONFIG
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.adapters import save_adapter
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import check_weight_files, fault_of_model, merge_adapter, save_pretrained_atomic
from tandem.models.precision import Precision
from tandem.plan.files.model import model_folder, read_model
from tandem.train.protocol import Exported

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"
"""Inside a checkpoint."""

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
        """Write the form that ``trainer.export`` names."""
        if self._trainer.export == "adapter":
            self._write_adapter(folder)
        else:
            weights = dict(self._export("merged"))
            precision = export_precision(self._trainer, self._config)
            save_pretrained_atomic(self._model, self._tokenizer, folder, weights=weights, precision=precision)

    def write_parts(self, root: Path) -> dict[str, Path]:
        """Return the parts of a checkpoint by name, and where under ``root`` each was written.

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


def export_precision(trainer: TrainerConfig, start: ModelConfig | None) -> Precision:
    """Return the dtypes in which a model that began as ``start`` is written; None is one that is new."""
    folder = None if start is None else model_folder(start.path)
    return Precision.asked_for(trainer.export_dtype, folder)


def copy_model(saved: Path, out: Path, adapter: bool | None = None) -> None:
    """Copy the model of a checkpoint, or of a finished run, to a folder of its own.

    ``adapter``: as a PEFT adapter, or as a Hugging Face folder with adapters merged; None: a model if there is one.
    """
    model, adapters = (
        _find(saved, MODEL_FOLDER, "config.json"),
        _find(saved, ADAPTER_FOLDER, ADAPTER_CONFIG),
    )
    if model is None and adapters is None:
        raise DataError(f"{saved}: holds no model; name a checkpoint (checkpoints/step_…) or a run's folder")
    if adapter and adapters is None:
        raise DataError(
            f"{saved}: holds no adapter; name a checkpoint of a LoRA run (checkpoints/step_…), or leave --adapter out"
        )
    if out.exists():
        raise DataError(f"{out} exists: choose another name, or remove it")
    source = adapters if adapter or model is None else model
    assert source is not None  # one of the two
    if out.resolve().is_relative_to(source.resolve()):
        raise DataError(f"{out} lies inside the model that is to be copied: choose a folder elsewhere")
    _require_undamaged(source, saved)
    try:
        if adapter is False and source is adapters:
            merge_adapter(source, out)
        else:
            with whole_folder(out) as scratch:
                shutil.copytree(source, scratch, dirs_exist_ok=True)
                if not (scratch / MANIFEST).exists():
                    write_manifest(scratch)
    except (OSError, SafetensorError) as error:
        raise WriteError(sentences(write_error(error, out), "Choose another folder")) from error


def _require_undamaged(source: Path, saved: Path) -> None:
    """Raise ``DataError`` with the file that isn't as written; of a folder without checksums, what its sizes tell."""
    check_weight_files(source)
    described = (source / "config.json").is_file()
    if described and (fault := fault_of_model(source) or read_model(source).misfit) is not None:
        raise DataError(f"{source}: {fault}. Write a config.json that fits its weights, or export another checkpoint")
    if (source / MANIFEST).exists():
        verify(source, own_changes=source == saved)
    elif (saved / MANIFEST).exists():
        verify(saved)


def _find(saved: Path, part: str, mark: str) -> Path | None:
    """Return the folder in a checkpoint or a run, or itself, that has the file ``mark``."""
    candidates = (saved / part, saved / FINAL_FOLDER, saved)
    return next((folder for folder in candidates if (folder / mark).exists()), None)


class PlainExport:
    """Writes a model of the user's own as Transformers or PEFT keeps it; its runs have no checkpoints."""

    def __init__(self, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model, tokenizer

    def write(self, folder: Path) -> None:
        """Write the whole folder, or leave what was there before."""
        save_pretrained_atomic(self._model, self._tokenizer, folder)

    def write_parts(self, root: Path) -> dict[str, Path]:
        """Return nothing: the model is a part of the checkpoint already."""
        del root
        return {}
