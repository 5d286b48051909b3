"""What is done with a trained model: scored again, or written out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tandem.base.errors import DataError
from tandem.base.folders import whole_folder
from tandem.base.manifest import MANIFEST, write_manifest
from tandem.config.load import load_config
from tandem.config.schema import NO_REWARD, Config
from tandem.control.entry import quiet
from tandem.models.adapter_spec import CONFIG as ADAPTER_CONFIG
from tandem.models.loading import merge_adapter
from tandem.observe.metrics import CONFIG_FILE
from tandem.plan.plan import PREFERENCE, compile_plan
from tandem.roles.reward import build_reward_manager
from tandem.runtime.build.composite import build_composite, model_tokenizer
from tandem.runtime.build.sources import held_out_prompts, prompt_tables
from tandem.session.exports import ADAPTER_FOLDER, FINAL_FOLDER, MODEL_FOLDER, find_export, require_undamaged
from tandem.session.parts import build_evaluator
from tandem.session.preference_session import held_out_evaluator


def run_eval(source: Path, words: Sequence[str]) -> int:
    """Score a model on the held-out prompts of its config; ``source`` is a run's folder or a config file."""
    quiet()
    file = source / CONFIG_FILE if source.is_dir() else source
    config = load_config(file, [] if source.is_dir() else words)
    if not isinstance(config, Config):
        raise DataError(f"{source}: is an SFT run; write a training config with data.val_files to evaluate its model")
    if source.is_dir():
        config = load_config(file, [*_trained(source), *words], kind=Config)
    plan = compile_plan(config)
    if plan.loop == PREFERENCE:
        return _eval_preferences(source, file, words)
    plan.require_runnable()
    if config.reward_manager.type == NO_REWARD:
        raise DataError("nothing scores the answers: add reward_manager.type=exact, or another scorer")
    tokenizer = model_tokenizer(config.actor_rollout_ref.model)
    prompts = held_out_prompts(config, tokenizer, prompt_tables(config))
    if not prompts:
        raise DataError("nothing to evaluate on: name data.val_files, or a data.source with a get_val_dataset()")
    rewards = build_reward_manager(config.reward_manager, tokenizer=tokenizer, plugins=config.plugins)
    with closing(rewards):
        composite = build_composite(config, replace(plan, teachers=()), tokenizer, 1)  # no one learns here
        evaluator = build_evaluator(config, composite, prompts, rewards)
        for name, value in evaluator.metrics(evaluator.answers()).items():
            print(f"{name} {value:.4f}")
    return 0


def _eval_preferences(source: Path, file: Path, words: Sequence[str]) -> int:
    """Compare the held-out preferences; the reference of a finished run is the model that it began with."""
    config = load_config(file, ["trainer.resume=null", *words], kind=Config)
    trained = load_config(file, [*(_trained(source) if source.is_dir() else ()), *words], kind=Config)
    plan = compile_plan(config)
    plan.require_runnable()
    evaluator = held_out_evaluator(config, plan, trained.actor_rollout_ref.model)
    for name, value in evaluator.metrics().items():
        print(f"{name} {value:.4f}")
    return 0


def _trained(run: Path) -> tuple[str, ...]:
    """The changes to the config of a finished ``run`` that make it start from what it trained."""
    final, model = run / FINAL_FOLDER, "actor_rollout_ref.model"
    always = (f"{model}.lora_rank=0", "trainer.export=merged", "trainer.resume=null")
    if (final / ADAPTER_CONFIG).is_file():
        return f"{model}.adapter_path={final}", *always
    plain = (
        f"{model}.adapter_path=null",
        f"{model}.lora_target_modules=all-linear",
        f"{model}.lora_base_dtype=float32",
    )
    return f"{model}.path={final}", *plain, "execution.weight_sync.lora=null", *always


def run_export(saved: Path, out: Path, adapter: bool | None = None) -> int:
    """Copy the model of a checkpoint, or of a finished run, to a folder of its own.

    ``adapter``: as a PEFT adapter, or as a Hugging Face folder with adapters merged; None: a model if there is one.
    """
    model, adapters = (
        find_export(saved, MODEL_FOLDER, "config.json"),
        find_export(saved, ADAPTER_FOLDER, ADAPTER_CONFIG),
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
    require_undamaged(source, saved)
    try:
        if adapter is False and source is adapters:
            quiet()
            merge_adapter(source, out)
        else:
            with whole_folder(out) as scratch:
                shutil.copytree(source, scratch, dirs_exist_ok=True)
                if not (scratch / MANIFEST).exists():
                    write_manifest(scratch)
    except OSError as error:
        raise DataError(f"{out}: can't be written ({error.strerror or error}); choose another folder") from error
    print(out)
    return 0
