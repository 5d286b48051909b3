"""Contradictions of a run on images: a model that sees none, data without a place for them, parts that take none."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tandem.base.errors import Problem
from tandem.config.model import ModelConfig
from tandem.config.schema import Config, DataConfig, SftConfig, SftDataConfig
from tandem.episodes.built_in import SINGLE_TURN
from tandem.models.families import AS_TEXT, IMAGE_FAMILIES
from tandem.plan.files.model import ModelFacts, model_folder
from tandem.plan.parts.engine import after_swap, engine_capabilities

MODEL = "actor_rollout_ref.model"
KEYS = ("image_key", "image_max_pixels", "image_max_bytes")
"""Keys of ``data`` that are read in a run on images."""

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def sees(facts: ModelFacts | None) -> bool:
    """Return whether the model is run on images; not known of one that is not here."""
    return facts is not None and bool(IMAGE_FAMILIES & {*facts.families})


def shows_images(config: Config, facts: ModelFacts | None) -> bool:
    """Return whether prompts of the run may show images.

    A model that is a language model too, such as Qwen3.5, is run on text alone where something else is, unless a column
    of images is named.
    """
    if facts is None or not sees(facts):
        return False
    reads_text = bool(AS_TEXT & {*facts.families}) and config.data.image_key is None
    return not (reads_text and any(_without_images(config)))


def check_images(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield every problem of images in a training run."""
    if not sees(facts):
        yield from _unread(config.data, MODEL, facts)
        return
    if not shows_images(config, facts):
        return
    yield from _check_reader(MODEL, config.actor_rollout_ref.model)
    yield from _check_text(config.data.image_key, config.data.chat or config.data.template is None)
    for key, value, where, remedy in _without_images(config):
        yield Problem(key, value, f"{where} on text alone so far, and the model sees images", remedy)


def check_sft_images(config: SftConfig, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield every problem of images in fine-tuning."""
    if not sees(facts):
        yield from _unread(config.data, "model", facts)
        return
    data = config.data
    yield from _check_reader("model", config.model)
    yield from _check_text(data.image_key, data.chat or data.messages_key is not None or bool(data.mix))


def _without_images(config: Config) -> Iterator[tuple[str, object, str, str]]:
    """Yield what runs on text alone: its key and value, what it does, what to write instead."""
    rollout, teacher = config.actor_rollout_ref.rollout, config.algorithm.distillation
    if config.critic.enable:
        yield "critic.enable", True, "a critic is trained", "Write an estimator such as grpo, and false"
    if teacher is not None:
        yield "algorithm.distillation", teacher.type, "teachers score", "Leave it out"
    if rollout.episode.type != SINGLE_TURN:
        key = "actor_rollout_ref.rollout.episode.type"
        yield key, rollout.episode.type, "episodes are played", f"Write {SINGLE_TURN}"
    swapped = [] if rollout.swap is None else [("swap.name", after_swap(config))]
    for key, one in (("name", config), *swapped):
        if not engine_capabilities(one).images:
            name = one.actor_rollout_ref.rollout.name
            yield f"actor_rollout_ref.rollout.{key}", name, f"the engine {name} generates", "Write hf"
    if config.data.on_overlong_prompt in ("left", "right"):
        cut, remedy = config.data.on_overlong_prompt, "Write error or drop"
        yield "data.on_overlong_prompt", cut, "prompts are cut", remedy


def _unread(data: DataConfig | SftDataConfig, model: str, facts: ModelFacts | None) -> Iterator[Problem]:
    """Report keys about images where the model sees none, or is not here to be looked at."""
    for name in KEYS:
        value = getattr(data, name)
        if value == type(data).model_fields[name].default:
            continue
        family = "unknown" if facts is None or not facts.families else facts.families[0]
        reason = f"images need a model that sees them, and {model}.path is of the family {family}"
        if facts is None:
            reason = f"{model}.path is not here, so nothing says whether it sees images"
        remedy = f"Name a model of {', '.join(sorted(IMAGE_FAMILIES))} in a folder, or leave it out"
        yield Problem(f"data.{name}", value, reason, remedy)


def _check_reader(key: str, model: ModelConfig) -> Iterator[Problem]:
    """Check whether images can be read: by the package, and as the model's own processor does."""
    if find_spec("PIL") is None:
        reason = "models that see images need the package pillow, which is not installed here"
        yield Problem(f"{key}.path", model.path, reason, "pip install 'tandem-rl[vision]'")
    folder = model_folder(model.path)
    if folder is not None and not any((folder / name).is_file() for name in _PROCESSORS):
        reason = f"the model sees images, and its folder has no {_PROCESSORS[0]}"
        yield Problem(f"{key}.path", model.path, reason, "Save its image processor there, as the model came with it")


def _check_text(image_key: str | None, messages: bool) -> Iterator[Problem]:
    """Report a column of images where examples are plain text."""
    if image_key is not None and not messages:
        reason = "only a chat template has a place for images, and these prompts are plain text"
        yield Problem("data.image_key", image_key, reason, "Write data.chat: true, or rows of messages")
