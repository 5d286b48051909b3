"""``tandem eval``: a trained model is scored on held-out prompts or preferences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from tandem.base.errors import DataError
from tandem.base.run_folder import KEY
from tandem.config.load import load_config
from tandem.config.schema import NO_REWARD, Config
from tandem.control.entry import quiet
from tandem.observe.metrics import CONFIG_FILE
from tandem.plan.checks.run_folder import RESUME
from tandem.plan.plan import PREFERENCE, Plan, compile_plan
from tandem.roles.reward import build_reward_manager
from tandem.roles.rollout.making import SingleAnswers
from tandem.runtime.build.composite import build_composite, model_tokenizer
from tandem.runtime.build.episodes import build_episodes
from tandem.runtime.build.finished import trained
from tandem.runtime.build.sources import held_out_prompts, prompt_tables
from tandem.session.build.parts import build_evaluator
from tandem.session.preferences import held_out_evaluator
from tandem.session.resume import check_inputs


def run_eval(source: Path, words: Sequence[str]) -> int:
    """Score a model on the held-out prompts of its config; ``source`` is a run's folder or a config file."""
    quiet()
    file = source / CONFIG_FILE if source.is_dir() else source
    config = load_config(file, [] if source.is_dir() else [*words, "trainer.resume=null"])
    if not isinstance(config, Config):
        raise DataError(f"{source}: is an SFT run; write a training config with data.val_files to evaluate its model")
    if source.is_dir():
        config = load_config(file, [*trained(source), *words], kind=Config)
    plan = compile_plan(config)
    if plan.loop == PREFERENCE:
        return _eval_preferences(source, file, words)
    _require_runnable(plan)
    check_inputs(config)
    if config.reward_manager.type == NO_REWARD:
        raise DataError("nothing scores the answers: add reward_manager.type=exact, or another scorer")
    tokenizer = model_tokenizer(config.actor_rollout_ref.model)
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
        for name, value in evaluator.metrics(answers).items():
            print(f"{name} {value:.4f}")
    return 0


def _require_runnable(plan: Plan) -> None:
    """Raise ``ConfigError`` with what speaks against the config but for where it would write: nothing is written."""
    read_only = replace(plan, problems=tuple(p for p in plan.problems if p.key not in (KEY, RESUME)))
    read_only.require_runnable()


def _eval_preferences(source: Path, file: Path, words: Sequence[str]) -> int:
    """Compare the held-out preferences; the reference of a finished run is the model that it began with."""
    config = load_config(file, ["trainer.resume=null", *words], kind=Config)
    later = load_config(file, [*(trained(source) if source.is_dir() else ()), *words], kind=Config)
    plan = compile_plan(config)
    _require_runnable(plan)
    check_inputs(later)
    evaluator = held_out_evaluator(config, plan, later.actor_rollout_ref.model)
    for name, value in evaluator.metrics().items():
        print(f"{name} {value:.4f}")
    return 0
