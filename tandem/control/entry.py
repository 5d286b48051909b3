"""What the commands call: a config in, an exit code out."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from pydantic import BaseModel
from transformers.utils import logging as transformers_logging

from tandem.base.errors import ContractError, DataError
from tandem.base.folders import whole_folder
from tandem.config.load import load_config
from tandem.config.schema import Config, SftConfig
from tandem.control import colocate
from tandem.control.sft import tune
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.roles.reward import build_reward_manager
from tandem.topology.composite import build_composite, model_tokenizer
from tandem.topology.local import build_evaluator, build_session
from tandem.topology.plan import Plan, compile_plan
from tandem.topology.session import FINAL_FOLDER, MODEL_FOLDER, Session
from tandem.topology.sft_session import build_sft_session
from tandem.topology.sources import held_out_prompts

LOOPS: dict[str, Callable[[Session], None]] = {"colocate": colocate.train}
CONFIG_FILE = "config.yaml"
_WINDOW = 10


def run_train(config: Config, plan: Plan) -> int:
    """Train, and tell what came of it."""
    _quiet()
    session = build_session(config, plan)
    _keep_config(config, Path(config.trainer.output_dir))
    left = session.progress.last - session.progress.step
    if session.progress.step:
        print(f"resumed after step {session.progress.step}; {left} steps left")
    with session.running():
        LOOPS[plan.mode](session)
    if session.progress.step < session.progress.last:
        raise ContractError(f"the run ended after {session.progress.step} of {session.progress.last} steps")
    _summarize(Path(config.trainer.output_dir))
    return 0


def run_sft(config: SftConfig) -> int:
    """Fine-tune, and tell what came of it."""
    _quiet()
    session = build_sft_session(config)
    _keep_config(config, Path(config.trainer.output_dir))
    with session.running():
        tune(session)
    _summarize(Path(config.trainer.output_dir))
    return 0


def run_eval(source: Path, words: Sequence[str]) -> int:
    """Score a model on the held-out prompts of its config; ``source`` is a run's folder or a config file."""
    _quiet()
    run = source.is_dir()
    config = load_config(source / CONFIG_FILE if run else source, words)
    if not isinstance(config, Config):
        raise DataError(f"{source}: is an SFT run; write a training config with data.val_files to evaluate its model")
    if run and not any(word.startswith("actor_rollout_ref.model.path") for word in words):
        config = load_config(source / CONFIG_FILE, [*words, f"actor_rollout_ref.model.path={source / FINAL_FOLDER}"])
        assert isinstance(config, Config)
    plan = compile_plan(config)
    plan.require_runnable()
    tokenizer = model_tokenizer(config.actor_rollout_ref.model)
    prompts = held_out_prompts(config, tokenizer)
    if not prompts:
        raise DataError("nothing to evaluate on: name data.val_files, or a data.source with a get_val_dataset()")
    rewards = build_reward_manager(config.reward_manager, tokenizer=tokenizer, plugins=config.plugins)
    with _closing(rewards.close):
        composite = build_composite(config, plan, tokenizer, 1)
        evaluator = build_evaluator(config, composite, prompts, rewards)
        for name, value in evaluator.metrics(evaluator.answers()).items():
            print(f"{name} {value:.4f}")
    return 0


def run_export(saved: Path, out: Path) -> int:
    """Copy the model of a checkpoint, or of a finished run, to a Hugging Face folder of its own."""
    candidates = [saved / MODEL_FOLDER, saved / FINAL_FOLDER, saved]
    model = next((folder for folder in candidates if (folder / "config.json").is_file()), None)
    if model is None:
        raise DataError(f"{saved}: holds no model; name a checkpoint (checkpoints/step_…) or a run's folder")
    if out.exists():
        raise DataError(f"{out} exists: choose another name, or remove it")
    with whole_folder(out) as scratch:
        shutil.copytree(model, scratch, dirs_exist_ok=True)
    print(out)
    return 0


def _summarize(output_dir: Path) -> None:
    """The first and last steps of the curve, and where everything is."""
    rows = read_rows(output_dir / METRICS_FILE)
    for label, key in (("reward", "reward/mean"), ("held-out reward", "eval/reward"), ("accuracy", "eval/accuracy")):
        values = [float(str(row[key])) for row in rows if row.get(key) is not None]
        if len(values) > 1:
            window = min(_WINDOW, len(values) // 2) if key == "reward/mean" else 1
            first, last = sum(values[:window]) / window, sum(values[-window:]) / window
            span = f" (means of {window} steps)" if window > 1 else ""
            print(f"{label}: {first:.3f} -> {last:.3f}{span}")
    print(f"model: {output_dir / FINAL_FOLDER}")
    print(f"report: {output_dir / 'report.html'}")


def _keep_config(config: BaseModel, output_dir: Path) -> None:
    """The whole config as it ran, defaults included, beside what it made."""
    output_dir.mkdir(parents=True, exist_ok=True)
    document = config.model_dump(mode="json", by_alias=True)
    (output_dir / CONFIG_FILE).write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "utf-8")


def _quiet() -> None:
    """Library progress bars would tear the progress line."""
    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


@contextmanager
def _closing(close: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        close()
