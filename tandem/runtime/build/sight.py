"""How the images of a run's rows are read, where its model sees some."""

from __future__ import annotations

import functools

from tandem.config.model import ModelConfig
from tandem.config.schema import Config, DataConfig, SftDataConfig
from tandem.data.pictures import Budget, Sight
from tandem.models.vision.image_reader import ImageReader
from tandem.plan.checks.model.images import sees, shows_images
from tandem.plan.files.model import model_folder, read_model


def prompt_sight(config: Config) -> Sight | None:
    """Return how images of prompts are read; None where the run is on text alone. Raises ``DataError``."""
    model = config.actor_rollout_ref.model
    folder = model_folder(model.path)
    if folder is None or not (folder / "config.json").is_file() or not shows_images(config, read_model(folder)):
        return None
    return sight_of(model, config.data)


def sight_of(model: ModelConfig, data: DataConfig | SftDataConfig) -> Sight | None:
    """Return how images are read for ``model``; None for one that is run on text alone. Raises ``DataError``."""
    folder = model_folder(model.path)
    if folder is None or not (folder / "config.json").is_file() or not sees(read_model(folder)):
        return None
    return Sight(_reader(str(folder)), Budget(data.image_max_pixels, data.image_max_bytes), data.image_key)


@functools.lru_cache(maxsize=2)
def _reader(folder: str) -> ImageReader:
    """Load one once, for training and held-out rows."""
    return ImageReader(folder)
