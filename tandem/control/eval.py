"""``tandem eval``: a trained model is scored on held-out prompts or preferences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from tandem.base.errors import DataError
from tandem.base.run_folder import CHECKPOINTS, KEY
from tandem.config.load import load_config
from tandem.config.schema import NO_REWARD, Config
from tandem.control.entry import quiet
from tandem.observe.metrics import CONFIG_FILE
from tandem.observe.table import scored_table
from tandem.plan.checks.run.run_folder import RESUME
from tandem.plan.plan import PREFERENCE, Plan, compile_plan
from tandem.roles.reward import build_reward_manager
from tandem.roles.rollout.making import SingleAnswers
from tandem.runtime.build.composite import build_composite, model_tokenizer
from tandem.runtime.build.episodes import build_episodes
from tandem.runtime.build.finished import trained
from tandem.runtime.build.sources import held_out_prompts, prompt_tables
from tandem.session.build.parts import build_evaluator
from tandem.session.keep.exports import ADAPTER_FOLDER, MODEL_FOLDER
from tandem.session.preferences import held_out_evaluator
from tandem.session.resume import check_inputs
from tandem.train.saved import checkpoints_in


def run_eval(source: Path, words: Sequence[str], *, checkpoints: bool = False) -> int:
    """Score a model on the held-out prompts of its config; ``source`` is a run's folder or a config file.

    ``checkpoints``: score each checkpoint of the run instead of its end, and mark the best.
    """
    quiet()
    if checkpoints:
        return _eval_checkpoints(source, words)
    for name, value in _metrics(source, trained(source) if source.is_dir() else (), words).items():
        print(f"{name} {value:.4f}")
    return 0


def _eval_checkpoints(source: Path, words: Sequence[str]) -> int:
    """Print a table with a row for each checkpoint, as soon as all are scored."""
    root = source / CHECKPOINTS
    found = [path for _, path in checkpoints_in(root)] if source.is_dir() else []
    if not found:
        raise DataError(f"{source}: there are no checkpoints in {root}; the run needs trainer.save_interval")
    rows: dict[str, dict[str, float]] = {}
    for number, path in enumerate(found, 1):
        print(f"evaluating {path.name} ({number} of {len(found)})", flush=True)
        parts = [part for name in (MODEL_FOLDER, ADAPTER_FOLDER) if (part := path / name).is_dir()]
        if not parts:
            raise DataError(f"{path}: holds no model")
        rows[path.name] = _metrics(source, trained(source, parts[0]), words)
    print(scored_table(rows, load_config(source / CONFIG_FILE, words).trainer.keep_best), end="")
    return 0


def _metrics(source: Path, changes: Sequence[str], words: Sequence[str]) -> dict[str, float]:
    """Score the model that ``changes`` make of the config; those of ``words`` go over them."""
    file = source / CONFIG_FILE if source.is_dir() else source
    config = load_config(file, [] if source.is_dir() else [*words, "trainer.resume=null"])
    if not isinstance(config, Config):
        raise DataError(f"{source}: is an SFT run; write a training config with data.val_files to evaluate its model")
    if source.is_dir():
        config = load_config(file, [*changes, *words], kind=Config)
    plan = compile_plan(config)
    if plan.loop == PREFERENCE:
        return _compared(file, changes, words)
    _require_runnable(plan)
    check_inputs(config)
    if config.reward_manager.type == NO_REWARD:
        raise DataError("nothing scores the answers: add reward_manager.type=exact, or another scorer")
    tokenizer = model_tokenizer(config.actor_rollout_ref.model, config.data)
    prompts = held_out_prompts(config, tokenizer, prompt_tables(config))
    if not prompts:
        raise DataError("nothing to evaluate on: name data.val_files, or a data.source with a get_val_dataset()")
    rewards = build_reward_manager(config.reward_manager, tokenizer=tokenizer, plugins=config.plugins)
    with closing(rewards), ExitStack() as stack:
        episodes = build_episodes(config, tokenizer)
        if episodes is not None:
            stack.callback(episodes.close)
            episodes.await_ready()
        composite = build_composite(config, replace(plan, teachers=()), tokenizer, 1)  # no one learns here
        make = SingleAnswers if episodes is None else episodes
        evaluator = build_evaluator(config, composite, prompts, rewards, make)
        answers = evaluator.answers()
        evaluator.require_scored()
        return evaluator.metrics(answers)


def _require_runnable(plan: Plan) -> None:
    """Raise ``ConfigError`` with what speaks against the config but for where it would write: nothing is written."""
    read_only = replace(plan, problems=tuple(p for p in plan.problems if p.key not in (KEY, RESUME)))
    read_only.require_runnable()


def _compared(file: Path, changes: Sequence[str], words: Sequence[str]) -> dict[str, float]:
    """Compare the held-out preferences; the reference of a finished run is the model that it began with."""
    config = load_config(file, ["trainer.resume=null", *words], kind=Config)
    later = load_config(file, [*changes, *words], kind=Config)
    plan = compile_plan(config)
    _require_runnable(plan)
    check_inputs(later)
    return held_out_evaluator(config, plan, later.actor_rollout_ref.model).metrics()
