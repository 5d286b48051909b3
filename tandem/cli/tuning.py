"""``tandem plan RUN.YAML --tune RUN_DIR``: what the times of a run make the fastest setting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.base.errors import DataError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.parts.placement import placements
from tandem.speed.advice import Advice, Choice, advise, resource_of
from tandem.speed.measured import Measured, read_measured
from tandem.speed.step_bound import Limit, Setting


def tune_words(words: Sequence[str], run: Path, *, as_json: bool) -> str:
    """Return the advice for the training run that ``words`` describe, by the measured run in the folder ``run``.

    Raises ``DataError`` where there is nothing to tune or to learn from.
    """
    config = load_words(words)
    if not isinstance(config, Config):
        raise DataError("--tune needs a training config: an SFT run has no rollout to balance against")
    advice = advise(config, read_measured(run))
    per_node = max(placement.devices_per_node for placement in placements(config))
    if as_json:
        return json.dumps(as_document(advice, per_node), indent=2) + "\n"
    return "\n".join(_lines(advice, per_node)) + "\n"


def as_document(advice: Advice, per_node: int) -> dict[str, Any]:
    """Return the advice as a document of plain values, for machines."""
    measured = advice.measured
    return {
        "kind": "tuning",
        "measured": {
            "run": str(measured.run),
            "steps": measured.steps,
            "seconds": measured.seconds,
            "parts": asdict(measured.parts),
            "setting": asdict(measured.setting),
            "limit": _limit(measured.limit),
            "fraction": measured.fraction,
        },
        "now": _choice(advice.now, per_node),
        "best": _choice(advice.best, per_node),
        "speedup": advice.speedup,
        "compared": [_choice(choice, per_node) for choice in advice.compared],
        "notes": list(advice.notes),
    }


def _choice(choice: Choice, per_node: int) -> dict[str, Any]:
    setting = choice.setting
    return {
        "seconds": choice.seconds,
        "setting": asdict(setting),
        "words": words_for(setting, per_node),
        "limit": _limit(choice.limit),
    }


def _limit(limit: Limit) -> dict[str, Any]:
    binding = limit.binding
    return {
        "seconds": limit.seconds,
        "bound": str(limit.bound),
        "addends": dict(binding.addends),
        "shared_by_steps": binding.steps,
    }


def words_for(setting: Setting, per_node: int) -> list[str]:
    """Return the setting as words of a command line."""
    resource = {role: list(devices) for role, devices in resource_of(setting, per_node).items()}
    words = [f"execution.mode={setting.mode}", f"execution.resource={json.dumps(resource, separators=(',', ':'))}"]
    if not setting.streams:
        return words
    return [
        *words,
        f"execution.max_staleness={setting.staleness}",
        f"execution.num_iters_per_train_update={setting.sub_batches}",
    ]


def _lines(advice: Advice, per_node: int) -> Iterator[str]:
    now, best = advice.now, advice.best
    yield from _measured_lines(advice.measured)
    yield ""
    yield f"this config  {now.seconds:.3g} s a step predicted; {now.limit.binding}"
    if best.setting == now.setting:
        yield "fastest      this config is within 1 % of the fastest setting"
    else:
        faster = f"{advice.speedup:.2f} times as fast"
        yield f"fastest      {best.seconds:.3g} s a step predicted, {faster}; {best.limit.binding}"
        yield from (f"             {word}" for word in words_for(best.setting, per_node))
    yield ""
    yield "compared     predicted  mode, devices, max_staleness, num_iters_per_train_update, what binds"
    for choice in advice.compared:
        yield f"             {choice.seconds:7.3g} s  {_in_words(choice.setting)}, {choice.limit.bound}"
    for note in advice.notes:
        yield f"note: {note}"
    yield f"note: predicted = best possible + {advice.measured.rest:.3g} s that no part of the measured step explains"


def _measured_lines(measured: Measured) -> Iterator[str]:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in asdict(measured.parts).items() if value)
    yield f"measured     {measured.run}: {measured.steps} steps of {_in_words(measured.setting)}"
    yield f"             {measured.seconds:.3g} s a step, {measured.fraction:.2f} of the best possible"
    yield f"             {measured.limit.binding}"
    yield f"parts        {parts} (rollout, train, reference, old in device-seconds)"


def _in_words(setting: Setting) -> str:
    roles = {"rollout": setting.rollout, "actor": setting.actor}
    roles |= {"reference": setting.reference, "actor_fwd": setting.actor_fwd}
    if not setting.streams:
        return f"{setting.mode}, {setting.rollout} shared"
    devices = " + ".join(f"{count} {role}" for role, count in roles.items() if count)
    return f"{setting.mode}, {devices}, {setting.staleness}, {setting.sub_batches}"
