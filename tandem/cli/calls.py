"""The commands ``train`` and ``sft`` as functions: the same config, plan, run and errors, with objects of the program.

Rows and a reward that are objects become what a config can name, so that a run from Python can be resumed and evaluated
by the commands: rows are kept in the run's folder, and a reward that other processes can import is named by its file.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tandem.base import interrupts
from tandem.base.errors import ConfigError, Problem
from tandem.base.run_folder import FINAL_FOLDER, METRICS_FILE
from tandem.cli.planning import runnable_sft, runnable_train
from tandem.config.load import load_config
from tandem.config.overrides import as_words
from tandem.config.schema import Config, SftConfig
from tandem.observe.run_log import Listener
from tandem.reward.registry import known_here

Source = str | Path | Mapping[str, Any] | Config | SftConfig | None
"""A YAML file, nested mappings as it holds them, a loaded config; None: the overrides say all."""


@dataclass(frozen=True)
class Trained:
    """What a run left in ``folder``."""

    folder: Path

    @property
    def model(self) -> Path:
        """The folder of the trained model, which transformers loads."""
        return self.folder / FINAL_FOLDER

    @property
    def metrics(self) -> list[dict[str, object]]:
        """The lines of ``metrics.jsonl``."""
        from tandem.observe.metrics import read_rows

        return read_rows(self.folder / METRICS_FILE)


def train(
    config: Source = None,
    overrides: Sequence[str] | str = (),
    *,
    reward: Callable[..., Any] | None = None,
    dataset: object = None,
    val_dataset: object = None,
    callbacks: Sequence[Listener] = (),
    **keys: object,
) -> Trained:
    """Train with reinforcement learning, as ``tandem train`` does.

    ``overrides`` are words of the command line (a list, or one text); ``keys`` are flags and sections:
    ``total_steps=20, lr=1e-5, trainer={"output_dir": "runs/mine"}``. ``reward`` is a scorer as the config could name
    one: a function of ``response``, ``ground_truth`` and so on, or a class. One that only this program has (of a
    notebook, a lambda) is called in this process, without a deadline. ``dataset`` and ``val_dataset`` are rows: a list
    of mappings, a ``datasets.Dataset``, a data frame. Each of ``callbacks`` is called with the step and its metrics
    once they are logged; what it raises ends the run.

    Raises what the command prints: ``ConfigError`` with all problems before anything starts, ``DataError``,
    ``TandemError``. Ctrl-C saves the steps that are done and raises ``KeyboardInterrupt``; ``resume="latest"`` goes on.
    Example::

        run = tandem.train("run.yaml", reward=lambda response: float("yes" in response), dataset=rows, total_steps=10)
    """
    words = [*as_words(overrides, keys, Config)]
    loaded = load_config(_tree(config), words, kind=Config)
    words += _rows_words(loaded.data.train_files, Path(loaded.trainer.output_dir), dataset, val_dataset)
    with _reward_words(loaded, reward) as more:
        ready, plan = runnable_train([*words, *more], _tree(config))
        with _interruptible(ready.trainer.output_dir):
            from tandem.control.entry import run_train

            run_train(ready, plan, callbacks)
    return Trained(Path(ready.trainer.output_dir))


def sft(
    config: Source = None,
    overrides: Sequence[str] | str = (),
    *,
    dataset: object = None,
    val_dataset: object = None,
    callbacks: Sequence[Listener] = (),
    **keys: object,
) -> Trained:
    """Fine-tune on examples, as ``tandem sft`` does; the arguments are those of ``train``. Example::

    run = tandem.sft("sft.yaml", dataset=[{"prompt": "1+1=", "response": "2"}], total_steps=10)
    """
    words = [*as_words(overrides, keys, SftConfig)]
    loaded = load_config(_tree(config), words, kind=SftConfig)
    words += _rows_words(loaded.data.train_files, Path(loaded.trainer.output_dir), dataset, val_dataset)
    ready, _ = runnable_sft(words, _tree(config))
    with _interruptible(ready.trainer.output_dir):
        from tandem.control.entry import run_sft

        run_sft(ready, callbacks)
    return Trained(Path(ready.trainer.output_dir))


def _tree(config: Source) -> str | Path | Mapping[str, Any] | None:
    return (
        config.model_dump(mode="json", by_alias=True, exclude_unset=True) if isinstance(config, BaseModel) else config
    )


def _rows_words(files: Sequence[str], folder: Path, dataset: object, val_dataset: object) -> list[str]:
    """Return the words that name the kept rows of both datasets."""
    if dataset is not None and files:
        reason, remedy = "the training data are named, and a dataset is given too", "Leave one of the two out"
        raise ConfigError([Problem("data.train_files", list(files), reason, remedy)])
    words = []
    for key, rows in (("data.train_files", dataset), ("data.val_files", val_dataset)):
        if rows is not None:
            from tandem.data.kept_rows import keep_rows

            words += as_words(
                (), {key: [str(keep_rows(rows, folder, key.partition(".")[2].partition("_")[0]))]}, Config
            )
    return words


@contextmanager
def _reward_words(config: Config, reward: Callable[..., Any] | None) -> Iterator[list[str]]:
    """Yield the words that name ``reward``, which is registered meanwhile where only this process has it."""
    if reward is None:
        yield []
        return
    if "type" in config.reward_manager.model_fields_set:
        reason, remedy = "the config names a reward, and one is given too", "Leave one of the two out"
        raise ConfigError([Problem("reward_manager.type", config.reward_manager.type, reason, remedy)])
    if not (inspect.isfunction(reward) or inspect.isclass(reward)):
        reason, remedy = "no function and no class", "Give a function, or a class whose objects are called with a batch"
        raise ConfigError([Problem("reward", repr(reward), reason, remedy)])
    module, name = sys.modules.get(reward.__module__), reward.__name__
    file = getattr(module, "__file__", None)
    if file is not None and reward.__module__ != "__main__" and getattr(module, name, None) is reward:
        yield as_words((), {"reward_manager.type": name, "reward_manager.file": file}, Config)
        return
    with known_here(name.strip("<>"), reward) as known:
        yield as_words((), {"reward_manager.type": known}, Config)


@contextmanager
def _interruptible(folder: str) -> Iterator[None]:
    """Let Ctrl-C end the run as it ends the command: what is done is saved, and a line says how to go on."""

    def how() -> str:
        return f"{interrupts.saved() or 'no step was saved'} (folder {folder}); go on with resume='latest'"

    with interrupts.unwinding(how):
        yield
