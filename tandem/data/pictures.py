"""Images of rows: found, held within a budget, decoded once to be checked, and again when their prompt is drawn.

A row gives an image as the path of a file (from the data file's folder on), the bytes of one, a base64 data URL, a
Pillow image, or the mapping {bytes, path} that the ``datasets`` package writes. Only its file is kept in memory, and
not its pixels.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.base.lazy import LazyModule

if TYPE_CHECKING:
    import PIL.Image as pillow
    import PIL.ImageOps as operations

    from tandem.columns.images import Images
    from tandem.data.rows import Row
    from tandem.models.vision.image_reader import ImageReader
else:
    pillow = LazyModule("PIL.Image")
    operations = LazyModule("PIL.ImageOps")


@dataclass(frozen=True)
class Budget:
    """The most that an image may have: ``pixels`` (width × height) and ``bytes`` of its file."""

    pixels: int
    bytes: int


@dataclass(frozen=True)
class Picture:
    """One image: the ``source`` it is read from (a file, or what one holds), its ``size`` (height, width) and what its
    bytes are told by.
    """

    source: Path | bytes = field(repr=False, compare=False)
    size: tuple[int, int]
    digest: str

    def decoded(self) -> pillow.Image:
        """Return the image in RGB. Raises ``DataError`` where its file is not the one that was checked."""
        content = self.source if isinstance(self.source, bytes) else _content(self.source)
        if _digest(content) != self.digest:
            raise DataError(f"{self.source!r}: the image is another one than when the run began: leave it as it was")
        return _opened(content)


@dataclass(frozen=True)
class Shown:
    """What a prompt shows: ``pictures`` in the order of their tokens, and who reads them."""

    pictures: tuple[Picture, ...]
    reader: ImageReader = field(repr=False, compare=False)

    def patches(self) -> Images | None:
        """Return the pixels for the model; None where there is no picture."""
        return self.reader.patches([picture.decoded() for picture in self.pictures]) if self.pictures else None


@dataclass(frozen=True)
class Sight:
    """How images of rows are read: ``column`` holds them, if they are not parts of messages; see ``Budget``."""

    reader: ImageReader
    budget: Budget
    column: str | None = None

    def shows(self, row: Row) -> bool:
        """Return whether the row has an image in its column."""
        return self.column is not None and row.find(self.column) not in (None, [])

    def picture(self, value: object, folder: Path) -> Picture:
        """Return the image that ``value`` is, a path counted from ``folder``. Raises ``DataError`` that says what is
        wrong.
        """
        source = _source(value, folder)
        size = len(source) if isinstance(source, bytes) else _size(source)
        if size > self.budget.bytes:
            raise DataError(
                f"an image of {size} bytes is larger than data.image_max_bytes = {self.budget.bytes}: raise it, or "
                "store the image smaller"
            )
        content = source if isinstance(source, bytes) else _content(source)
        image = _opened(content, self.budget.pixels)
        return Picture(source, (image.height, image.width), _digest(content))

    def tokens(self, picture: Picture) -> int:
        """Return the tokens that the image has in a prompt."""
        return self.reader.tokens(picture.size)

    def expanded(
        self, ids: Sequence[int], mask: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[int]]:
        """Return ``ids`` and ``mask`` with the one token of each image repeated as often as it has some.

        Raises ``DataError`` where there are not as many as ``pictures``, or one is among what is learned.
        """
        places = [i for i, token in enumerate(ids) if token == self.reader.image_token]
        if len(places) != len(pictures):
            raise DataError(
                f"the prompt has places for {len(places)} images, and there are {len(pictures)}: the chat template "
                "must write one image token for each image, and the text none"
            )
        counts = [1] * len(ids)
        for place, picture in zip(places, pictures, strict=True):
            counts[place] = self.tokens(picture)
        whole = [token for token, count in zip(ids, counts, strict=True) for _ in range(count)]
        learned = [on for on, count in zip(mask, counts, strict=True) for _ in range(count)]
        first = next((i for i, on in enumerate(learned) if on), len(learned))
        if self.reader.image_token in whole[first:]:
            raise DataError("an image stands after the first answer that is learned: images go before it")
        return whole, learned


def _source(value: object, folder: Path) -> Path | bytes:
    """Return where the image that ``value`` is can be read, or its bytes."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping):
        url = value.get("url")
        inner = next((value[key] for key in ("bytes", "path") if value.get(key) is not None), url)
        if inner is None:
            raise DataError("an image is a mapping without bytes and without a path")
        return _source(inner, folder)
    if isinstance(value, str):
        if value.startswith("data:"):
            return _from_url(value)
        if "://" in value[:12] and not value.startswith("file://"):
            raise DataError(f"the image {value[:60]!r} is an address, and nothing is downloaded: write a file's path")
        return folder / Path(value.removeprefix("file://")).expanduser()
    if hasattr(value, "convert") and hasattr(value, "save"):
        kept: Any = value
        written = io.BytesIO()
        operations.exif_transpose(kept).convert("RGB").save(written, "PNG")
        return written.getvalue()
    raise DataError(f"an image is a {type(value).__name__}: write a path, bytes, a data URL, or {{bytes, path}}")


def _from_url(url: str) -> bytes:
    head, found, text = url.partition(",")
    if not found or not head.endswith(";base64"):
        raise DataError(f"the image {url[:40]!r} is no base64 data URL: write data:image/png;base64,…")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"the image {url[:40]!r} is not base64: {error}") from error


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise DataError(f"the image {str(file)!r} can't be read: {error.strerror}") from error


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"the image {str(file)!r} can't be read: {error.strerror}") from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _opened(content: bytes, most: int | None = None) -> pillow.Image:
    """Return the decoded image, upright and in RGB.

    One of more pixels than ``most`` is refused before it is decoded.
    """
    try:
        image = pillow.open(io.BytesIO(content))
        width, height = image.size
        if most is not None and width * height > most:
            raise DataError(
                f"an image of {width} × {height} = {width * height} pixels is larger than data.image_max_pixels = "
                f"{most}: raise it, or store the image smaller"
            )
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            raise DataError(f"an image has {frames} frames: models are trained on single images, not on video")
        return operations.exif_transpose(image).convert("RGB")
    except DataError:
        raise
    except Exception as error:  # what a broken file provokes in a decoder: many types, none documented
        said = (str(error).splitlines() or ["no message"])[0]
        raise DataError(f"an image can't be decoded ({type(error).__name__}: {said})") from error
