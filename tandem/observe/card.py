"""The model card of a finished run: what it is, and how it was trained, from the files of the run alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from tandem.base.errors import DataError
from tandem.base.hidden import hide_in
from tandem.base.run_folder import CONFIG_FILE, FINAL_FOLDER, METRICS_FILE
from tandem.observe.about import read_about, starts_in, state_of
from tandem.observe.metrics import Row, read_rows
from tandem.observe.summary import CURVES

_LEARNING = (
    ("advantage estimator", "algorithm.adv_estimator"),
    ("loss", "algorithm.policy_loss"),
    ("KL to the start", "algorithm.kl"),
    ("reward", "reward_manager.type"),
    ("mode", "execution.mode"),
    ("prompts per step", "data.train_batch_size"),
    ("answers per prompt", "actor_rollout_ref.rollout.n"),
    ("temperature", "actor_rollout_ref.rollout.temperature"),
    ("tokens of an answer, at most", "data.max_response_length"),
    ("learning rate", "actor_rollout_ref.actor.optim.lr"),
    ("LoRA rank", "actor_rollout_ref.model.lora_rank"),
    ("compute type", "actor_rollout_ref.model.dtype"),
)
_TUNING = (
    ("examples per step", "data.train_batch_size"),
    ("tokens of an example, at most", "data.max_length"),
    ("learning rate", "optim.lr"),
    ("LoRA rank", "model.lora_rank"),
    ("compute type", "model.dtype"),
)
_OF_BOTH = (("chat template arguments", "data.chat_template_kwargs"), ("seed", "trainer.seed"))


def card_of(run: Path, repo: str) -> str:
    """Return the card of the model that ``run`` trained, as Markdown with its YAML header; without secrets.

    Local paths are shown by their last part. Raises ``DataError`` where the run has no config that can be read.
    """
    config = config_in(run)
    tuned = "actor_rollout_ref" not in config
    base = str(_at(config, "model.path" if tuned else "actor_rollout_ref.model.path") or "")
    is_adapter = (run / FINAL_FOLDER / "adapter_config.json").is_file()
    header: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tandem", "sft" if tuned else "reinforcement-learning"],
    }
    if _is_hub_id(base):
        header["base_model"] = base
    lines = [
        *("---", yaml.safe_dump(header, sort_keys=False).rstrip(), "---", "", f"# {repo.rpartition('/')[2]}", ""),
        f"{_what(base, tuned, config)} It was trained with [Tandem](https://pypi.org/project/tandem-rl/), and "
        "this card was written from the files of the run.",
        *("", "## How it was trained", "", "| | |", "| --- | --- |"),
        *(f"| {name} | {_cell(value)} |" for name, value in _settings(config, tuned)),
        *("", "## What came of it", "", *_results(run, read_rows(run / METRICS_FILE))),
        *("", "## The run", "", *_begins(run)),
        "",
        f"The whole config is in `training/{CONFIG_FILE}`, the numbers of every step in `training/{METRICS_FILE}`.",
    ]
    return "\n".join(lines) + "\n"


def config_in(run: Path) -> dict[str, Any]:
    """Return the config of ``run`` as it ran, without secrets. Raises ``DataError`` where there is none to be read."""
    try:
        found = yaml.safe_load((run / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{run}: its {CONFIG_FILE} can't be read ({error}). Name a run's trainer.output_dir") from None
    if not isinstance(found, dict):
        raise DataError(f"{run}: its {CONFIG_FILE} holds no config. Name a run's trainer.output_dir")
    hidden: dict[str, Any] = hide_in(found)
    return hidden


def _what(base: str, tuned: bool, config: Mapping[str, Any]) -> str:
    how = "fine-tuned on examples" if tuned else "trained with reinforcement learning"
    if not tuned and _at(config, "reward_manager.type") in (None, "none"):
        how = "trained further"
    if not base:
        return f"A new model, {how}."
    return f"[{base}](https://huggingface.co/{base}), {how}." if _is_hub_id(base) else f"`{_short(base)}`, {how}."


def _settings(config: Mapping[str, Any], tuned: bool) -> Iterator[tuple[str, Any]]:
    data = config.get("data") or {}
    for name, key in (("training data", "train_files"), ("held out", "val_files")):
        if data.get(key):
            yield name, ", ".join(_short(str(file)) for file in data[key])
    if data.get("reasoning_gym"):
        yield "training data", f"reasoning_gym {data['reasoning_gym'].get('dataset')}"
    for name, key in (*(_TUNING if tuned else _LEARNING), *_OF_BOTH):
        value = _at(config, key)
        off = value in (None, {}, []) or (key.endswith("lora_rank") and value == 0)
        if not off and not (isinstance(value, Mapping) and value.get("in") == "off"):
            yield name, value


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        named = [str(value["type"])] if "type" in value else []
        rest = (f"{key}: {item}" for key, item in value.items() if key != "type" and item is not None)
        value = ", ".join([*named, *rest])
    return str(value).replace("|", "\\|").replace("\n", " ")


def _results(run: Path, rows: Sequence[Row]) -> Iterator[str]:
    state = state_of(run, read_about(run))
    steps = rows[-1]["step"] if rows else 0
    ended = "did not say how it ended" if state.kind == "unknown" else state.kind
    yield f"{steps} step{'' if steps == 1 else 's'}; the run {ended}."
    curves = [(label, [float(str(row[key])) for row in rows if row.get(key) is not None]) for label, key in CURVES]
    shown = [(label, values) for label, values in curves if values]
    if shown:
        yield from ("", "| | first step | last step | best |", "| --- | --- | --- | --- |")
        for label, values in shown:
            best = min(values) if label.endswith("loss") else max(values)
            yield f"| {label} | {values[0]:.4g} | {values[-1]:.4g} | {best:.4g} |"


def _begins(run: Path) -> Iterator[str]:
    starts = starts_in(read_about(run))
    if not starts:
        yield "It notes neither when it began nor with which versions."
    for start in starts:
        command = [_short(word) if word.startswith("/") else word for word in map(str, start.get("command", []))]
        versions = ", ".join(f"{name} {version}" for name, version in (start.get("versions") or {}).items())
        begun = f"began {str(start.get('began', ''))[:16]}" + (
            "" if start.get("resumed_step") is None else f", resumed after step {start['resumed_step']}"
        )
        yield f"- {begun}: `{shlex.join(command)}` (Python {start.get('python')}, {versions})"


def _at(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _is_hub_id(path: str) -> bool:
    return path.count("/") == 1 and path[0] not in "./~" and not Path(path).exists()


def _short(path: str) -> str:
    """Return the last part of a path, its run's name before ``final``: where it lay is nobody's business."""
    parts = PurePath(path).parts
    return "/".join(parts[-2:] if parts[-1:] == (FINAL_FOLDER,) else parts[-1:]) or path
