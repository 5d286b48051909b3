"""What the commands call: a config in, an exit code out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from transformers.utils import logging as transformers_logging

from tandem.base.errors import ContractError
from tandem.config.schema import Config, SftConfig
from tandem.control import colocate, fully_async, hybrid, preference
from tandem.control.sft import require_updates, tune
from tandem.data.catalog import RowCounts
from tandem.observe.metrics import CONFIG_FILE, METRICS_FILE, Row, read_rows
from tandem.plan.plan import PREFERENCE, Plan
from tandem.session.build import build_session
from tandem.session.exports import FINAL_FOLDER
from tandem.session.preference_session import build_preference_session
from tandem.session.sft_session import build_sft_session

LOOPS: dict[str, Callable[[Any], None]] = {
    "colocate": colocate.train,
    "hybrid": hybrid.train,
    "fully_async": fully_async.train,
    "preference": preference.train,
}
CURVES = (
    ("reward", "reward/mean"),
    ("held-out reward", "eval/reward"),
    ("accuracy", "eval/accuracy"),
    ("held-out loss", "eval/loss"),
)
"""What is told of a run at its end, where it has it: (label, metric)."""

_WINDOW = 10


def run_train(config: Config, plan: Plan) -> int:
    """Train, and tell what came of it."""
    quiet()
    session = build_preference_session(config, plan) if plan.loop == PREFERENCE else build_session(config, plan)
    _keep_config(config, Path(config.trainer.output_dir))
    _tell_counts(session.source.counts)
    left = session.progress.last - session.progress.step
    if session.progress.step:
        print(f"resumed after step {session.progress.step}; {left} steps left")
    with session.running():
        LOOPS[plan.loop](session)
    if session.progress.step < session.progress.last:
        raise ContractError(f"the run ended after {session.progress.step} of {session.progress.last} steps")
    require_updates(session.actor.updates, session.progress.last)
    _summarize(Path(config.trainer.output_dir), session.summary())
    return 0


def run_sft(config: SftConfig) -> int:
    """Fine-tune, and tell what came of it."""
    quiet()
    session = build_sft_session(config)
    _tell_counts(session.source.counts)
    _keep_config(config, Path(config.trainer.output_dir))
    if session.nothing_left is not None:
        print(f"nothing is left to do: {session.nothing_left}")
    elif session.first:
        print(f"resumed after step {session.first}; {session.last - session.first} steps left")
    with session.running():
        tune(session)
    require_updates(session.engine.updates, session.last)
    _summarize(Path(config.trainer.output_dir), {})
    return 0


def _tell_counts(counts: RowCounts) -> None:
    """What became of the rows, where not all are used as they are."""
    if counts.dropped or counts.cut:
        print(f"data: {counts}")


def _summarize(output_dir: Path, summary: Mapping[str, str]) -> None:
    """The first and last steps of the curve, the run's own ``summary``, and where everything is."""
    rows = read_rows(output_dir / METRICS_FILE)
    for label, key in CURVES:
        values = [float(str(row[key])) for row in rows if row.get(key) is not None]
        if len(values) > 1:
            window = min(_WINDOW, len(values) // 2) if key == "reward/mean" else 1
            first, last = sum(values[:window]) / window, sum(values[-window:]) / window
            span = f" (means of {window} steps)" if window > 1 else ""
            print(f"{label}: {first:.3f} -> {last:.3f}{span}{_of_those_scored(rows, key)}")
    for label, told in summary.items():
        print(f"{label}: {told}")
    print(f"model: {output_dir / FINAL_FOLDER}")
    print(f"report: {output_dir / 'report.html'}")


def _of_those_scored(rows: Sequence[Row], key: str) -> str:
    """What a mean reward leaves out, where it leaves anything out."""
    shares = [float(str(row[share])) for row in rows if (share := f"{key.partition('/')[0]}/scored_share") in row]
    told = key in ("reward/mean", "eval/reward") and shares and min(shares) < 1
    return f", of the {sum(shares) / len(shares):.0%} of the answers that were scored" if told else ""


def _keep_config(config: BaseModel, output_dir: Path) -> None:
    """The whole config as it ran, defaults included, beside what it made."""
    output_dir.mkdir(parents=True, exist_ok=True)
    document = config.model_dump(mode="json", by_alias=True)
    (output_dir / CONFIG_FILE).write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "utf-8")


def quiet() -> None:
    """Library progress bars would tear the progress line."""
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)  # it prints what is raised as well
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
