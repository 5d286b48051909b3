"""What the commands call: a config in, an exit code out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from transformers.utils import logging as transformers_logging

from tandem.base.errors import ContractError
from tandem.base.folders import write_error
from tandem.base.hidden import hide, hide_in
from tandem.base.run_folder import owned
from tandem.config.schema import Config, SftConfig
from tandem.control.colocate import train_colocate
from tandem.control.fully_async import train_fully_async
from tandem.control.hybrid import train_hybrid, train_hybrid_pipelined
from tandem.control.preferences import train_preferences
from tandem.control.sft import fine_tune
from tandem.data.mixture import Stream, rows_in_words
from tandem.observe.metrics import CONFIG_FILE
from tandem.observe.run_log import Listener
from tandem.observe.summary import summarize
from tandem.plan.plan import PREFERENCE, Plan
from tandem.session.build.run import build_session
from tandem.session.idle import require_updates
from tandem.session.preferences import build_preference_session
from tandem.session.sft import build_sft_session

LOOPS: dict[str, Callable[[Any], None]] = {
    "colocate": train_colocate,
    "hybrid": train_hybrid,
    "hybrid_pipelined": train_hybrid_pipelined,
    "fully_async": train_fully_async,
    "preference": train_preferences,
}
"""By the ``loop`` of a plan."""


def run_train(config: Config, plan: Plan, listeners: Sequence[Listener] = ()) -> int:
    """Train, and print what came of it; ``listeners`` are told of each step."""
    quiet()
    with owned(Path(config.trainer.output_dir)):
        return _train(config, plan, listeners)


def _train(config: Config, plan: Plan, listeners: Sequence[Listener]) -> int:
    session = build_preference_session(config, plan) if plan.loop == PREFERENCE else build_session(config, plan)
    _keep_config(config, Path(config.trainer.output_dir))
    run, progress = session.run, session.run.progress
    run.log.listen(listeners)
    _print_rows(session.source, config.data.train_batch_size, progress.last)
    if progress.step:
        print(f"resumed after step {progress.step}; {progress.last - progress.step} steps left")
    with run.running():
        LOOPS[plan.loop](session)
    if progress.step < progress.last:
        raise ContractError(f"the run ended after {progress.step} of {progress.last} steps")
    require_updates(session.actor.updates, progress.last)
    summarize(Path(config.trainer.output_dir), run.summary())
    return 0


def run_sft(config: SftConfig, listeners: Sequence[Listener] = ()) -> int:
    """Fine-tune, and print what came of it; ``listeners`` are told of each step."""
    quiet()
    with owned(Path(config.trainer.output_dir)):
        return _tune(config, listeners)


def _tune(config: SftConfig, listeners: Sequence[Listener]) -> int:
    session = build_sft_session(config)
    session.run.log.listen(listeners)
    progress = session.run.progress
    _print_rows(session.source, config.data.train_batch_size, progress.last)
    _keep_config(config, Path(config.trainer.output_dir))
    if session.nothing_left is not None:
        print(f"nothing is left to do: {session.nothing_left}")
    elif progress.step:
        print(f"resumed after step {progress.step}; {progress.last - progress.step} steps left")
    with session.run.running():
        fine_tune(session.run, session.draw, session.tuner.learn)
    require_updates(session.tuner.engine.updates, progress.last)
    summarize(Path(config.trainer.output_dir), {})
    return 0


def _print_rows(source: Stream[Any], batch_size: int, steps: int) -> None:
    """Print what became of the rows, where not all are used as they are."""
    if rows := rows_in_words(source, batch_size, steps):
        print(f"data: {rows}")


def _keep_config(config: BaseModel, output_dir: Path) -> None:
    """Keep the whole config as it ran, defaults included, beside what it made."""
    document, file = config.model_dump(mode="json", by_alias=True), output_dir / CONFIG_FILE
    try:
        file.write_text(yaml.safe_dump(hide_in(document), sort_keys=False, allow_unicode=True), "utf-8")
    except OSError as error:
        raise write_error(error, file) from error


def quiet() -> None:
    """Silence the progress bars of libraries, which would tear the progress line."""
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)  # it prints what is raised as well
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_WithoutSecrets("%(levelname)s %(name)s: %(message)s"))


class _WithoutSecrets(logging.Formatter):
    """A format without secrets for all that is logged, other libraries' lines too."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))
