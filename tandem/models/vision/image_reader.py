"""The image processor of a model: how many tokens an image has, and its pixels as patches.

It is loaded beside the tokenizer, in the version that needs Pillow alone: ``AutoProcessor`` would build one for videos
too, which needs torchvision. Placeholders are counted and written by this package.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.base.lazy import LazyModule
from tandem.columns.images import Images
from tandem.models.families import IMAGE_FAMILIES

if TYPE_CHECKING:
    import transformers
    from PIL.Image import Image
else:
    transformers = LazyModule("transformers")


PREVIEW = 192
"""Pixels of a side of what a person is shown, at most."""


class ImageReader:
    """Reads images as the model in ``path`` (folder or hub id) was trained to.

    ``image_token`` is the id that stands for an image in a prompt. Raises ``DataError`` where the model sees none, or
    comes without the config of an image processor.
    """

    def __init__(self, path: str | Path, *, trust_remote_code: bool = False) -> None:
        try:
            config: Any = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
            processor: Any = transformers.AutoImageProcessor.from_pretrained(
                str(path), backend="pil", trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, ImportError) as error:
            raise DataError(
                f"model {str(path)!r}: its image processor can't be loaded ({str(error).splitlines()[0]}). It needs a "
                "preprocessor_config.json in the model's folder, and the package pillow: pip install "
                "'tandem-rl[vision]'"
            ) from error
        if config.model_type not in IMAGE_FAMILIES:
            raise DataError(f"model {str(path)!r}: the family {config.model_type} is run on text alone")
        merged, patch = config.vision_config.spatial_merge_size, config.vision_config.patch_size
        if (processor.merge_size, processor.patch_size) != (merged, patch):
            raise DataError(
                f"model {str(path)!r}: its image processor makes patches of {processor.patch_size} pixels and joins "
                f"{processor.merge_size} of them on a side, and its config.json says {patch} and {merged}: take both "
                "from one model"
            )
        self.image_token: int = config.image_token_id
        self._processor = processor

    def tokens(self, size: tuple[int, int]) -> int:
        """Return the tokens of an image of ``size`` (height, width). Raises ``DataError`` for one that can't be cut."""
        try:
            patches: int = self._processor.get_number_of_image_patches(*size)
        except (ValueError, ZeroDivisionError) as error:
            raise DataError(f"an image of {size[1]} × {size[0]} pixels can't be read: {error}") from error
        return patches // int(self._processor.merge_size) ** 2

    def patches(self, pictures: Sequence[Image]) -> Images:
        """Return ``pictures`` (one at least, RGB) as patches."""
        found = self._processor(images=list(pictures), return_tensors="pt")
        return Images(found["pixel_values"].float(), found["image_grid_thw"], tuple(map(_preview, pictures)))


def _preview(picture: Image) -> bytes:
    """Return a PNG file of the picture, made smaller where a side has more than ``PREVIEW`` pixels."""
    small, written = picture.copy(), io.BytesIO()
    small.thumbnail((PREVIEW, PREVIEW))
    small.save(written, "PNG")
    return written.getvalue()
