"""What is done with a trained model: scored again, or written out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tandem.base.errors import DataError
from tandem.base.folders import whole_folder
from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.control.entry import quiet
from tandem.models.loading import check_weight_files
from tandem.observe.metrics import CONFIG_FILE
from tandem.roles.reward import build_reward_manager
from tandem.topology.composite import build_composite, model_tokenizer
from tandem.topology.parts import build_evaluator
from tandem.topology.plan import PREFERENCE, compile_plan
from tandem.topology.preference_session import held_out_evaluator
from tandem.topology.session import FINAL_FOLDER, MODEL_FOLDER
from tandem.topology.sources import held_out_prompts, prompt_tables


def run_eval(source: Path, words: Sequence[str]) -> int:
    """Score a model on the held-out prompts of its config; ``source`` is a run's folder or a config file."""
    quiet()
    file = source / CONFIG_FILE if source.is_dir() else source
    config = load_config(file, [] if source.is_dir() else words)
    if not isinstance(config, Config):
        raise DataError(f"{source}: is an SFT run; write a training config with data.val_files to evaluate its model")
    if source.is_dir():
        trained = (f"actor_rollout_ref.model.path={source / FINAL_FOLDER}", "trainer.resume=null")
        config = load_config(file, [*trained, *words], kind=Config)
    plan = compile_plan(config)
    if plan.loop == PREFERENCE:
        return _eval_preferences(source, file, words)
    plan.require_runnable()
    tokenizer = model_tokenizer(config.actor_rollout_ref.model)
    prompts = held_out_prompts(config, tokenizer, prompt_tables(config))
    if not prompts:
        raise DataError("nothing to evaluate on: name data.val_files, or a data.source with a get_val_dataset()")
    rewards = build_reward_manager(config.reward_manager, tokenizer=tokenizer, plugins=config.plugins)
    with closing(rewards):
        composite = build_composite(config, plan, tokenizer, 1)
        evaluator = build_evaluator(config, composite, prompts, rewards)
        for name, value in evaluator.metrics(evaluator.answers()).items():
            print(f"{name} {value:.4f}")
    return 0


def _eval_preferences(source: Path, file: Path, words: Sequence[str]) -> int:
    """Compare the held-out preferences; the reference of a finished run is the model that it began with."""
    config = load_config(file, ["trainer.resume=null", "actor_rollout_ref.model.lora_rank=0", *words], kind=Config)
    plan = compile_plan(config)
    plan.require_runnable()
    evaluator = held_out_evaluator(config, plan, source / FINAL_FOLDER if source.is_dir() else None)
    for name, value in evaluator.metrics().items():
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
    if out.resolve().is_relative_to(model.resolve()):
        raise DataError(f"{out} lies inside the model that is to be copied: choose a folder elsewhere")
    check_weight_files(model)
    try:
        with whole_folder(out) as scratch:
            shutil.copytree(model, scratch, dirs_exist_ok=True)
    except OSError as error:
        raise DataError(f"{out}: can't be written ({error.strerror or error}); choose another folder") from error
    print(out)
    return 0
