"""The images of a prompt as a column: one object for all samples of a group, so that pixels are put once and never
copied."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.base.errors import ContractError, DataError
from tandem.columns.equality import same_tensor

IMAGES = "images"
"""The column: an ``Images`` for each sample, or None where its prompt shows none."""

_PIXELS, _GRID = "pixels", "grid"


@dataclass(frozen=True, eq=False)
class Images:
    """Images in the order of their places in a prompt, cut into patches.

    ``pixels`` (N, D) float32: the patches of all images, one after the other. ``grid`` (I, 3) int64: of each image, its
    patches in time (1), height and width, whose product is the number of its patches. ``previews``: a small PNG file of
    each, for people; those that were saved and loaded have none. Never changed: samples share it.
    """

    pixels: Tensor
    grid: Tensor
    previews: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.pixels.ndim != 2 or self.grid.ndim != 2 or self.grid.shape[1] != 3:
            raise ContractError(
                f"images: expected pixels (N, D) and grid (I, 3), got {tuple(self.pixels.shape)} and "
                f"{tuple(self.grid.shape)}"
            )
        if int(self.grid.prod(-1).sum()) != len(self.pixels):
            raise ContractError(
                f"images: grids {self.grid.tolist()} are {int(self.grid.prod(-1).sum())} patches, and there are "
                f"{len(self.pixels)}"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Images):
            return False
        return self is other or (same_tensor(self.pixels, other.pixels) and same_tensor(self.grid, other.grid))

    def __hash__(self) -> int:
        return hash((tuple(self.pixels.shape), tuple(self.grid.flatten().tolist())))

    def __repr__(self) -> str:
        return f"Images({len(self.grid)} of {len(self.pixels)} patches)"

    @property
    def urls(self) -> list[str]:
        """The previews as addresses that hold them."""
        return [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in self.previews]

    @classmethod
    def join(cls, parts: Sequence[Images]) -> Images:
        """Return the images of all ``parts`` (one at least), in order; a single part as it is."""
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([part.pixels for part in parts]), torch.cat([part.grid for part in parts]))


def distinct(rows: Sequence[Images | None]) -> tuple[list[Images], list[int | None]]:
    """Return the different objects among ``rows``, and of each row which of them it is: told by identity, which is what
    sharing means.
    """
    found: dict[int, Images] = {id(row): row for row in rows if row is not None}
    place = {key: number for number, key in enumerate(found)}
    return list(found.values()), [None if row is None else place[id(row)] for row in rows]


def pack(columns: Mapping[str, list[Any]]) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
    """Return the ``columns`` with numbers in the place of images, and the images' tensors, each once, by names for
    ``unpack``.
    """
    plain: dict[str, list[Any]] = dict(columns)
    tensors: dict[str, Tensor] = {}
    for name, rows in columns.items():
        if any(isinstance(row, Images) for row in rows):
            every, plain[name] = distinct(rows)
            for number, images in enumerate(every):
                tensors[f"{name}.{number}.{_PIXELS}"] = images.pixels
                tensors[f"{name}.{number}.{_GRID}"] = images.grid
    return plain, tensors


def unpack(columns: Mapping[str, list[Any]], tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the columns that ``pack`` was given. Raises ``DataError`` where an image's tensors are not there."""
    plain = dict(columns)
    for name in {key.partition(".")[0] for key in tensors if key.endswith(f".{_PIXELS}")} & columns.keys():
        made: dict[int, Images] = {}
        for number in {row for row in columns[name] if row is not None}:
            try:
                made[number] = Images(tensors[f"{name}.{number}.{_PIXELS}"], tensors[f"{name}.{number}.{_GRID}"])
            except KeyError as error:
                raise DataError(f"saved DataProto: image {number} of column {name!r} is not there") from error
        plain[name] = [None if row is None else made[row] for row in columns[name]]
    return plain
