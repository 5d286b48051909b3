"""Contradictions between the config and the checkpoint that the run goes on from, and what else has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tandem.base.errors import Problem
from tandem.base.run_folder import KEY
from tandem.config.schema import Config, SftConfig
from tandem.plan.checks.run.run_folder import RESUME, Saved
from tandem.plan.files.mix import mix_names
from tandem.plan.parts.placement import uses_reference
from tandem.plan.reference import reference_problem
from tandem.plan.resumed import (
    SETTINGS,
    flat,
    kind_of,
    model_identity,
    model_of,
    saved_tags,
    tokenizer_identity,
)
from tandem.stages.facts import REF
from tandem.train.schedule import lr_factor

ANY = Config | SftConfig
MODEL = "actor_rollout_ref.model"
_COMMANDS = {"examples": "tandem sft", "preferences": "tandem train", "rewards": "tandem train"}
_OF_THE_START = (RESUME, KEY, f"{MODEL}.path", f"{MODEL}.tokenizer_path", "model.path", "model.tokenizer_path")


@dataclass(frozen=True)
class Kept:
    """``keys``, and all below them, that a run can't change on the way where ``where`` holds, and why."""

    keys: tuple[str, ...]
    reason: str
    where: Callable[[ANY, Mapping[str, Any]], bool] = lambda config, then: True

    def names(self, key: str) -> bool:
        """Return whether it is about ``key``."""
        return any(key == own or key.startswith(f"{own}.") for own in self.keys)


_ADAPTERS = ("lora_rank", "lora_alpha", "lora_target_modules", "adapter_path")


def _adapted(config: ANY, then: Mapping[str, Any]) -> bool:
    return model_of(config).trains_adapters


def _has_critic(config: ANY, then: Mapping[str, Any]) -> bool:
    return isinstance(config, Config) and config.critic.enable and bool(then.get("critic.enable"))


KEPT = (
    Kept(("data.train_batch_size",), "the place in the data is counted in steps of the saved size"),
    Kept(("trainer.seed",), "the order of the data and the random streams of all samples derive from it"),
    Kept(("data.shuffle",), "the place in the data is one in the saved order"),
    Kept(("data.reasoning_gym",), "the place in the data is one among the saved questions"),
    Kept(
        tuple(f"{section}.{name}" for section in (MODEL, "model") for name in _ADAPTERS),
        "the checkpoint holds the weights of other parameters, or for another scale of them",
    ),
    Kept(
        (f"{MODEL}.lora_base_dtype", "model.lora_base_dtype"),
        "the adapters were trained beside weights of another type",
        _adapted,
    ),
    Kept(("model.new",), "the checkpoint holds the weights of a model of another shape, or another alphabet"),
    Kept(
        tuple(f"critic.model.{name}" for name in ("path", *_ADAPTERS)),
        "the checkpoint holds the weights of another critic",
        _has_critic,
    ),
)
"""What a run that goes on has as the saved one had it; everything else may change, and is told."""


def check_resumed(config: ANY, saved: Saved, steps: int | None) -> Iterator[Problem]:
    """Check what keeps a run of ``steps`` (None: the data tell) from going on from ``saved``."""
    then, kind = saved.facts.get(SETTINGS), kind_of(config)
    if then is not None and then["kind"] != kind:
        reason = f"{saved.path} is of a run that learns from {then['kind']}, and this one learns from {kind}"
        remedy = f"Go on with {_COMMANDS[then['kind']]} and the config of that run, or start a new run{_from(saved)}"
        yield Problem(RESUME, config.trainer.resume, reason, remedy)
        return
    if steps is not None and saved.step > steps:
        yield beyond_the_end(saved.step, steps, str(saved.path))
    if then is None:  # of a version that wrote none: the run itself compares what it loads
        return
    yield from _check_kept(config, saved, then["keys"])
    yield from _check_models(config, saved, then)
    if isinstance(config, SftConfig):
        yield from _check_mix(config, saved)
    else:
        yield from _check_roles(config, saved, then)


def beyond_the_end(step: int, steps: int, path: str) -> Problem:
    """Return the problem that the checkpoint at ``path`` is of a later step than the run's last."""
    reason = f"the checkpoint is of step {step}, the run ends at step {steps}"
    return Problem(RESUME, path, reason, "Raise trainer.total_steps")


def _check_kept(config: ANY, saved: Saved, then: Mapping[str, Any]) -> Iterator[Problem]:
    for key, before, now in _changed(config, then):
        for kept in KEPT:
            if kept.names(key) and kept.where(config, then):
                remedy = f"Write {key}: {_shown(before)}, or start a new run{_from(saved)}"
                yield Problem(key, now, f"the saved run has {_shown(before)}, and {kept.reason}", remedy)


def _check_models(config: ANY, saved: Saved, then: Mapping[str, Any]) -> Iterator[Problem]:
    """Check whether model and tokenizer are those that the run began with, wherever they are now."""
    section, model = ("model" if isinstance(config, SftConfig) else MODEL), model_of(config)
    for name, key, now, found in (
        ("model", "path", model.path, model_identity(config)),
        ("tokenizer", "tokenizer_path", model.tokenizer, tokenizer_identity(config)),
    ):
        before = then["keys"].get(f"{section}.{key}") or then["keys"].get(f"{section}.path")
        known = then[name]
        if known == found if known and found else before == now:
            continue
        differs = _differ(known, found) if known and found else ""
        reason = f"the saved run began with the {name} in {before}, which this is not{differs}"
        if name == "tokenizer" and model.tokenizer_path is None:
            key = "path"
        remedy = f"Write the folder of that {name}, wherever it is now, or start a new run{_from(saved)}"
        yield Problem(f"{section}.{key}", now, reason, remedy)
        return


def _differ(known: Mapping[str, str], found: Mapping[str, str]) -> str:
    files = sorted(file for file in {**known, **found} if known.get(file) != found.get(file))
    return f" ({', '.join(files[:3])} {'differs' if len(files) == 1 else 'differ'})"


def _check_mix(config: SftConfig, saved: Saved) -> Iterator[Problem]:
    weights = dict(zip(mix_names(config.data), (part.weight for part in config.data.mix), strict=True))
    before = saved.facts["data"].get("weights", {})
    if before != weights:
        shown = [{"name": name, "weight": weight} for name, weight in before.items()]
        remedy = f"Write data.mix with {_shown(shown) if shown else 'no part'}, or start a new run{_from(saved)}"
        yield Problem("data.mix", weights, f"the saved run has the mix {_shown(before)}", remedy)


def _check_roles(config: Config, saved: Saved, then: Mapping[str, Any]) -> Iterator[Problem]:
    """Check whether the critic and the reference of the config are in the checkpoint."""
    keys = then["keys"]
    if config.critic.enable and not keys["critic.enable"]:
        remedy = f"Write the estimator of the saved run and critic.enable: false, or start a new run{_from(saved)}"
        yield Problem("critic.enable", True, "the saved run has no critic to go on with", remedy)
    if REF in saved_tags(config) and REF not in then["tags"]:
        key = _moved_by(config, keys)
        reason = f"the saved run has {_shown(keys[key])}, and its checkpoints hold no reference to compare with"
        remedy = f"Write {key}: {_shown(keys[key])}, or start a new run{_from(saved)}"
        yield Problem(key, flat(config)[key], reason, remedy)
    elif config.execution.mode == "fully_async" and uses_reference(config):
        yield from reference_problem(config, saved.step, saved.path)


def _moved_by(config: Config, then: Mapping[str, Any]) -> str:
    """Return the key by which a run needs a copy of the reference that the saved one had not.

    It is one without whose change none is needed. The mode may change, so that it is named where nothing else is.
    """
    now = flat(config)
    keys = (
        "algorithm.kl.in",
        "algorithm.kl.coef",
        "algorithm.policy_loss.type",
        "actor_rollout_ref.ref.update_interval",
        "execution.mode",
    )
    changed = [key for key in keys if key in then and then[key] != now[key]]
    alone = (key for key in changed[:-1] if not _needs_copy(config, key, then[key]))
    return next(alone, changed[-1] if changed else keys[0])


def _needs_copy(config: Config, key: str, value: Any) -> bool:
    """Return whether the run would need a copy of the reference with ``value`` under ``key``, too."""
    tree = config.model_dump(mode="json", by_alias=True)
    *sections, name = key.split(".")
    section = tree
    for part in sections:
        section = section[part]
    section[name] = value
    try:
        return REF in saved_tags(Config.model_validate(tree))
    except ValidationError:
        return True


def resume_notes(config: ANY, saved: Saved, updates: int | None) -> Iterator[str]:
    """Note what has changed since the checkpoint and may; ``updates`` are those of the whole run, None: the data
    tell.
    """
    then = saved.facts.get(SETTINGS)
    if then is None or then["kind"] != kind_of(config):
        return
    keys = then["keys"]
    changes = [
        f"{key} {_shown(before)} -> {_shown(now)}"
        for key, before, now in _changed(config, keys)
        if key not in _OF_THE_START and not any(kept.names(key) and kept.where(config, keys) for kept in KEPT)
    ]
    if changes:
        yield f"from step {saved.step} on the run has other values than the saved one: {'; '.join(changes)}"
    if isinstance(config, Config):
        kl, was_adaptive = config.algorithm.kl, keys["algorithm.kl.controller"] == "adaptive"
        if was_adaptive and kl.controller == "adaptive" and kl.coef != keys["algorithm.kl.coef"]:
            yield "algorithm.kl.coef is where the adaptive controller began: it goes on from the saved coefficient"
    yield from _moved_schedule(config, saved, updates)


def _moved_schedule(config: ANY, saved: Saved, updates: int | None) -> Iterator[str]:
    """Warn that the learning rate jumps where another end stretches or shortens the way that it falls."""
    optim = config.optim if isinstance(config, SftConfig) else config.actor_rollout_ref.actor.optim
    before = saved.facts[SETTINGS]["updates"]
    if optim.schedule == "constant" or updates is None or before is None or updates == before:
        return
    done = saved.facts["actor"]["updates"] if "actor" in saved.facts else saved.step
    was, now = (
        optim.lr
        * lr_factor(
            optim.schedule,
            done,
            warmup_steps=optim.warmup_steps,
            total_steps=end,
            min_ratio=optim.min_lr_ratio,
            cycles=optim.num_cycles,
        )
        for end in (before, updates)
    )
    how = "stretched" if updates > before else "shortened"
    yield (
        f"the {optim.schedule} schedule is {how}: the saved run's ended at update {before}, this one's ends at "
        f"{updates}. Update {done + 1} has a learning rate of {now:.3g}, where the saved run had {was:.3g}; schedule: "
        "constant with the lr that you want keeps it"
    )


def _changed(config: ANY, then: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value then, value now) of what is not the same, in the order of the config; None for what isn't
    there.
    """
    now = flat(config)
    for key in dict.fromkeys([*now, *then]):
        if then.get(key) != now.get(key):
            yield key, then.get(key), now.get(key)


def _shown(value: Any) -> str:
    """Return the value as YAML has it in one line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _from(saved: Saved) -> str:
    model = saved.path / "model"
    return f" from {model}" if model.is_dir() else ""
