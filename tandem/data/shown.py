"""Where the images of a row stand in its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.base.errors import DataError
from tandem.data.modalities import kind_of_part
from tandem.data.pictures import Picture, Sight
from tandem.data.rows import Row

MARK = "<image>"
"""What stands for an image of the column in the text of a message."""

_PLACE: dict[str, Any] = {"type": "image"}
_INSIDE = ("image", "image_url", "url", "path", "bytes", "base64")


def with_images(sight: Sight, row: Row, messages: object) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
    """Return messages whose image parts hold nothing, as chat templates expect them, and the images in order.

    An image is in its part, or is the next one of the row's column. Where the column has images and the messages no
    place for any, they stand before the text of the first message of the user. Raises ``RowError`` and ``DataError``.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise DataError("images belong to chat messages: write data.chat: true, or rows of messages")
    given = list(_given(sight, row))
    placed: list[dict[str, Any]] = []
    found: list[object] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise DataError(f"a message is a {type(message).__name__}, not a mapping of role and content")
        content = message.get("content")
        if isinstance(content, str) and given and MARK in content:
            content = list(_marked(content))
        if isinstance(content, list | tuple):
            content = [_bare(part, found) for part in content]
        placed.append({**message, "content": content})
    if given and not found:
        _put_first(placed, len(given))
        found = [None] * len(given)
    waiting = sum(value is None for value in found)
    if waiting != len(given):
        raise DataError(
            f"the messages have places for {waiting} images, and the column {sight.column!r} has {len(given)}"
        )
    following = iter(given)
    values = [next(following) if value is None else value for value in found]
    folder = Path(row.table).parent
    return placed, tuple(_picture(sight, row, value, folder) for value in values)


def _picture(sight: Sight, row: Row, value: object, folder: Path) -> Picture:
    try:
        return sight.picture(value, folder)
    except DataError as error:
        raise row.bad("broken image", str(error)) from error


def _given(sight: Sight, row: Row) -> Iterator[object]:
    """Yield the images of the row's column; none where it is null."""
    if sight.column is None or row.find(sight.column) is None:
        return
    value = row.nested(sight.column)
    yield from value if isinstance(value, list | tuple) else [value]


def _marked(text: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a text, which has a mark for each image."""
    for number, part in enumerate(text.split(MARK)):
        if number:
            yield dict(_PLACE)
        if part:
            yield {"type": "text", "text": part}


def _bare(part: object, found: list[object]) -> object:
    """Return a part without its image, which is added to ``found``; None there where the column has it."""
    if kind_of_part(part) != "image" or not isinstance(part, Mapping):
        return part
    inside = next((part[key] for key in _INSIDE if part.get(key) is not None), None)
    found.append(inside)
    return dict(_PLACE)


def _put_first(messages: list[dict[str, Any]], count: int) -> None:
    """Put places for ``count`` images before the text of the first message of the user."""
    first = next((message for message in messages if message.get("role") == "user"), None)
    if first is None:
        raise DataError("there are images, and no message of the user that could show them")
    content = first["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    first["content"] = [*(dict(_PLACE) for _ in range(count)), *text]
