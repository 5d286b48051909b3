"""Contradictions in the scorer: its name, its file, its parameters, those of the parts of a sum."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from tandem.base.errors import Problem
from tandem.base.procedural import RECIPE
from tandem.base.registry import Signature
from tandem.base.regular import irregular_in, regular
from tandem.config.schema import Config
from tandem.models.adapter_spec import CONFIG as ADAPTER
from tandem.models.folder.described import fault_of_config
from tandem.plan.checks.parameters import check_type
from tandem.plan.checks.samples.data import named_sources
from tandem.plan.files.model import looks_like_path, model_folder, offline, shapes_in_files
from tandem.reward.parts import Part, read_parts
from tandem.reward.registry import REWARDS, Check, check_variables
from tandem.reward.resolve import problems
from tandem.reward.static import describe

HEADS = {"score", "classifier", "classification_head", "logits_proj"}
"""Names that the heads of sequence classifiers have in transformers."""


def check_reward(config: Config) -> Iterator[Problem]:
    """Yield every problem of ``reward_manager``: type, parameters and parts, without running a file of the user's."""
    reward = config.reward_manager
    yield from problems(reward.type, reward.file, reward.parameters, config.plugins)
    for scorer in scorers_of(config):
        signature = describe(scorer.type, scorer.file, config.plugins)
        if isinstance(signature, Signature):
            wrong = list(_check_types(scorer, signature))
            yield from wrong or _check_values(scorer, signature)
            yield from _check_ground_truth(config, scorer, signature)
            yield from _check_time(config, scorer, signature)
        yield from _check_folder(scorer)
        yield from _check_recipes(config, scorer)
        yield from _check_routes(config, scorer)


def scorers_of(config: Config) -> Iterator[Part]:
    """Yield the scorer of ``reward_manager``, and those inside it."""
    reward = config.reward_manager
    yield from _scorers(Part("reward_manager", reward.type, reward.file, reward.parameters))


def _scorers(scorer: Part) -> Iterator[Part]:
    """Yield the scorer, and those inside it."""
    yield scorer
    parts = read_parts(scorer.type, scorer.file, scorer.parameters, scorer.key)
    for part in [] if isinstance(parts, Problem) else parts:
        yield from _scorers(part)


def _check_types(scorer: Part, signature: Signature) -> Iterator[Problem]:
    for parameter, value in scorer.parameters.items():
        if parameter in signature.parameters:
            yield from check_type(f"{scorer.key}.{parameter}", value, signature.parameters[parameter])
    for wrong in check_variables(scorer.parameters):
        key = f"{scorer.key}.{wrong.parameter}"
        yield Problem(key, scorer.parameters[wrong.parameter], wrong.reason, wrong.remedy)


def _check_values(scorer: Part, signature: Signature) -> Iterator[Problem]:
    """Check what a built-in scorer itself objects to, once all of its parameters are there."""
    given = {name: declared.default for name, declared in signature.parameters.items()} | scorer.parameters
    needed = {name for name, declared in signature.parameters.items() if declared.required}
    if scorer.file is not None or scorer.type not in REWARDS or not needed <= scorer.parameters.keys():
        return
    check: Check = REWARDS[scorer.type].traits["check"]  # type: ignore[assignment]
    for wrong in check(given):
        yield Problem(f"{scorer.key}.{wrong.parameter}", given[wrong.parameter], wrong.reason, wrong.remedy)


def _check_ground_truth(config: Config, scorer: Part, signature: Signature) -> Iterator[Problem]:
    data = config.data
    if "ground_truth" in signature.columns and data.answer_key is None and data.reasoning_gym is None:
        reason = f"the reward {scorer.type!r} compares with a ground truth, and the data are read without one"
        yield Problem("data.answer_key", None, reason, "Write its column, or another reward")


def _check_time(config: Config, scorer: Part, signature: Signature) -> Iterator[Problem]:
    """Check that a scorer that gives itself time (``total_s``) is done before its process is ended."""
    if "total_s" not in signature.parameters:
        return
    own = scorer.parameters.get("total_s", signature.parameters["total_s"].default)
    limit = config.reward_manager.timeout_s
    if isinstance(own, int | float) and own >= limit:
        reason = f"{scorer.type!r} may take {own:g} s for a sample ({scorer.key}.total_s), and is ended before that"
        yield Problem("reward_manager.timeout_s", limit, reason, f"Write more than {own:g}, or a smaller total_s")


def _check_folder(scorer: Part) -> Iterator[Problem]:
    """Check that a reward model's folder is there, where its path can't be a hub id, and holds a sequence
    classifier.
    """
    path = scorer.parameters.get("path")
    if scorer.type != "reward_model" or scorer.file is not None or not isinstance(path, str):
        return
    folder = model_folder(path)
    if folder is None and (looks_like_path(path) or "/" not in path):
        what = "there is no such folder" if path else "no model is named"
        yield Problem(f"{scorer.key}.path", path, what, "Name a Hugging Face folder or a hub id, which has an owner")
    elif folder is None and offline():
        what = "as a hub id it isn't in the cache, and HF_HUB_OFFLINE forbids to download it"
        yield Problem(f"{scorer.key}.path", path, what, "Write an existing folder, or unset HF_HUB_OFFLINE once")
    elif folder is not None and (reason := _no_classifier(folder)) is not None:
        remedy = "Name the folder of a model that was trained as AutoModelForSequenceClassification"
        yield Problem(f"{scorer.key}.path", path, reason, remedy)


def _no_classifier(folder: Path) -> str | None:
    """Return why a folder can't be a trained sequence classifier, as far as its config and the names of its tensors
    tell.
    """
    if (folder / ADAPTER).is_file():
        return "it is an adapter, and a reward model is a whole one (merge them)"
    try:
        config = json.loads(regular(folder / "config.json").read_text())
        architectures = [str(name) for name in config.get("architectures") or []]
        fault = irregular_in(folder) or fault_of_config(config)
    except (OSError, ValueError, AttributeError, TypeError):
        return irregular_in(folder)  # loading it says what else is wrong
    if fault is not None:
        return fault
    names = {part for tensor in shapes_in_files(folder) for part in tensor.split(".")}
    if any(name.endswith("ForSequenceClassification") for name in architectures) or names & HEADS:
        return None
    if names:
        return f"it has no trained head of a classifier (its tensors have none of {', '.join(sorted(HEADS))})"
    if architectures and architectures[0].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return f"it is a {architectures[0]}, which has no head of a classifier: one would be drawn at random"
    return None


def _check_recipes(config: Config, scorer: Part) -> Iterator[Problem]:
    """Check that rows bring the recipe by which reasoning_gym scores."""
    data = config.data
    if scorer.type != "reasoning_gym" or scorer.file is not None:
        return
    if data.reasoning_gym is None and RECIPE not in data.extra_keys:
        reason = "it scores by the recipe of a row, and the rows of these data have none"
        yield Problem(f"{scorer.key}.type", scorer.type, reason, "Write data.reasoning_gym={dataset: NAME, size: N}")


def _check_routes(config: Config, scorer: Part) -> Iterator[Problem]:
    """Check that data whose rows have a source by their name have a route; inside a route, another says which rows
    come.
    """
    if scorer.type != "by_source" or scorer.file is not None or ".routes[" in scorer.key:
        return
    routes = read_parts(scorer.type, None, scorer.parameters, scorer.key)
    if isinstance(routes, Problem):
        return
    patterns = [pattern for route in routes for pattern in route.sources]
    for source in named_sources(config.data, [*config.data.train_files, *config.data.val_files]):
        if not any(fnmatchcase(source, pattern) for pattern in patterns):
            reason = f"no route is for the prompts of {source!r}"
            remedy = f"Add {{source: {source}, type: ...}}, or write data.data_source_key"
            yield Problem(f"{scorer.key}.routes", ", ".join(patterns), reason, remedy)
