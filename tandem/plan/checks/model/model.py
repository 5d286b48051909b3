"""Contradictions between the config and the model's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tandem.base.errors import Problem
from tandem.base.regular import irregular_in
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.models.families import AS_TEXT, IMAGE_FAMILIES, REFUSED
from tandem.models.folder.fetch import DEFAULT_ROOT
from tandem.plan.files.model import ModelFacts, looks_like_path, model_folder, offline, read_model
from tandem.plan.parts.adapters import ADAPTER, read_adapter
from tandem.plan.parts.batch import longest_sequence


def read_checked(
    key: str, model: ModelConfig, *, headed: bool = False, sees: bool = False
) -> tuple[ModelFacts | None, list[Problem]]:
    """Return what the model's folder says, and what is wrong with it. A hub id that isn't cached gives neither.

    ``headed``: a head of its own is put on it, so that it may come with one that grades. ``sees``: it may be of a
    family that is run on images.
    """
    folder = model_folder(model.path)
    if folder is None:
        return None, list(_missing(f"{key}.path", model.path))
    named = model.tokenizer_path
    tokenizer = (
        [] if named is None or model_folder(named) is not None else list(_missing(f"{key}.tokenizer_path", named))
    )
    if (fault := irregular_in(folder)) is not None:
        return None, [Problem(f"{key}.path", model.path, fault, "Take it out of the folder, or save the model again")]
    if not (folder / "config.json").is_file():
        if (folder / ADAPTER).is_file():
            return None, [_adapter_as_model(key, model.path, folder), *tokenizer]
        reason = "the folder has no config.json, so it is no Hugging Face model"
        remedy = "Write the folder that save_pretrained wrote"
        return None, [Problem(f"{key}.path", model.path, reason, remedy), *tokenizer]
    try:
        facts = read_model(folder)
        return facts, [*_refused(key, model, facts, headed, sees), *tokenizer]
    except (OSError, ValueError) as error:
        return None, [
            Problem(f"{key}.path", model.path, f"its config.json can't be read: {error}", "Mend or save it again"),
            *tokenizer,
        ]


def _refused(key: str, model: ModelConfig, facts: ModelFacts, headed: bool, sees: bool) -> Iterator[Problem]:
    for family in facts.families:
        if family in REFUSED:
            reason = f"the model family {family} can't be trained or sampled: {REFUSED[family]}"
            yield Problem(f"{key}.path", model.path, reason, "Choose a model of a family in docs/models.md")
    known = AS_TEXT | IMAGE_FAMILIES if sees else AS_TEXT
    if model.freeze and not (sees and IMAGE_FAMILIES & set(facts.families)):
        reason = "only a model that sees images has such parts, and this one is run on text"
        yield Problem(f"{key}.freeze", model.freeze, reason, "Leave it out")
    elif model.freeze and model.trains_adapters:
        reason = "adapters are on the language part, and nothing else is trained anyway"
        yield Problem(f"{key}.freeze", model.freeze, reason, "Leave it out")
    if facts.senses and not known & set(facts.families):
        named = facts.families[0] if facts.families else "unknown"
        reason = f"models of the family {named} read more than text ({', '.join(facts.senses)}), which comes later"
        yield Problem(f"{key}.path", model.path, reason, "Choose a language model; docs/models.md lists families")
    if facts.other_kind is not None and not (headed and "Classification" in facts.other_kind):
        reason = f"its config.json says {facts.other_kind}, and what is trained here goes on with a text"
        yield Problem(f"{key}.path", model.path, reason, "Choose a language model; docs/models.md lists families")
    elif facts.unknown is not None and not facts.senses:
        remedy = "Install a transformers that has the family, or choose a model of one in docs/models.md"
        yield Problem(f"{key}.path", model.path, facts.unknown, remedy)
    if facts.quantized is not None:
        reason = f"its weights are quantized ({facts.quantized}), and weights are trained and pushed in full precision"
        yield Problem(f"{key}.path", model.path, reason, "Name the model that it was made of, or save it dequantized")
    elif facts.misfit is not None:
        remedy = "Write what the weights have into it, or save the model again"
        yield Problem(f"{key}.path", model.path, facts.misfit, remedy)


def _adapter_as_model(key: str, path: str, folder: Path) -> Problem:
    """Return the problem of a PEFT folder where a model belongs."""
    base = read_adapter(folder).base or "BASE_MODEL"
    remedy = f"Write {key}.path: {base} and {key}.adapter_path: {path}"
    return Problem(f"{key}.path", path, "the folder holds a LoRA adapter, not the model that it belongs to", remedy)


def check_context(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Check whether the longest prompt with the longest response fits the model's context."""
    longest = longest_sequence(config)
    if facts is None or facts.context is None or facts.context.tokens >= longest:
        return
    data = config.data
    reason = (
        f"with max_prompt_length {data.max_prompt_length} a sequence can have {longest} tokens, and {facts.context.why}"
    )
    limit = facts.context.tokens
    room = limit - data.max_prompt_length
    remedy = f"Write at most {room}" if room > 0 else f"Lower data.max_prompt_length below {limit} first"
    yield Problem("data.max_response_length", data.max_response_length, reason, remedy)


def check_exact(config: Config) -> Iterator[Problem]:
    """Report other dtypes than float32, in which alone bit equality is promised."""
    dtype = config.actor_rollout_ref.model.dtype
    if config.trainer.exact and dtype != "float32":
        reason = f"bit-equal runs are computed in float32, and actor_rollout_ref.model.dtype is {dtype}"
        yield Problem("trainer.exact", True, reason, "Write dtype: float32, or exact: false")


def exact_notes(config: Config) -> Iterator[str]:
    """Note what ``trainer.exact`` makes of the bounds of a micro-batch."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    tokens, samples = n * longest_sequence(config), actor.ppo_micro_batch_size
    if not config.trainer.exact:
        return
    if actor.micro_batch_tokens < tokens:
        yield (
            "trainer.exact trains each group as one micro-batch, which may have "
            f"{tokens} tokens: ppo_max_token_len_per_gpu = {actor.ppo_max_token_len_per_gpu} does not bound it"
        )
    if samples is not None and samples < n:
        yield (
            f"trainer.exact trains each group of {n} samples as one micro-batch: ppo_micro_batch_size = {samples} does "
            "not bound it"
        )


def _missing(key: str, path: str) -> Iterator[Problem]:
    if not path:
        yield Problem(key, path, "no model is named", "Write a Hugging Face folder or a hub id such as Qwen/Qwen3-0.6B")
    elif looks_like_path(path) or Path(path).is_file():
        yield from _missing_folder(key, path)
    elif Path(path).parent == DEFAULT_ROOT:
        remedy = f"Run `tandem models fetch {Path(path).name}`, or write an existing folder"
        yield Problem(key, path, "there is no such folder", remedy)
    elif "/" in path and Path(path).parent.is_dir():  # so it is meant as a folder beside others, not as a hub id
        yield from _missing_folder(key, path)
    elif offline():
        reason = "there is no such folder; as a hub id it isn't in the cache, and HF_HUB_OFFLINE forbids to download it"
        yield Problem(key, path, reason, "Write an existing folder, or unset HF_HUB_OFFLINE once")
    elif "/" not in path:
        reason = "there is no such folder, and a hub id has an owner"
        yield Problem(key, path, reason, "Write an existing folder, or owner/name")


def _missing_folder(key: str, path: str) -> Iterator[Problem]:
    """Report a missing folder, and name its neighbours."""
    folder = Path(path).expanduser()
    if folder.is_file():
        yield Problem(key, path, "it is a file", "Write the folder that holds it")
        return
    there = f"There is no folder {folder.parent} either"
    if folder.parent.is_dir():
        neighbours = sorted(place.name for place in folder.parent.iterdir() if place.is_dir())
        there = f"In {folder.parent}: {', '.join(neighbours[:6]) or 'no folder'}"
    yield Problem(key, path, "there is no such folder", f"Write an existing folder. {there}")
