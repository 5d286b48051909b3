"""Images, video and sound in rows and messages: known, so that what is not read is refused, and never dropped or read
as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

KINDS = ("image", "video", "audio")
"""What a column or a part of a message may hold beside text."""

COLUMNS = frozenset({*KINDS, *(f"{kind}s" for kind in KINDS), "pixel_values", "multi_modal_data"})
"""Names that columns of them have in public data sets."""


def kind_of_part(part: object) -> str | None:
    """Return what a part of a message's content is, where it isn't text: by its type (``image_url``) or by its key."""
    if not isinstance(part, Mapping):
        return None
    written = str(part.get("type") or "")
    named = next((kind for kind in KINDS if kind in written), None)
    return named or next((kind for kind in KINDS for key in (kind, f"{kind}_url") if part.get(key) is not None), None)


def kind_in_messages(value: object, *, images: bool = False) -> str | None:
    """Return what the first part of some messages is that isn't text, nor an image where ``images`` are read.

    None where there is none, or ``value`` is no messages.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    contents = (message.get("content") for message in value if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    read = {None, "image"} if images else {None}
    return next((kind for part in parts if (kind := kind_of_part(part)) not in read), None)


def beyond_text(
    row: Mapping[str, object], *, images: bool = False, image_key: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (column, what it holds) of a row's columns that hold more than text; empty ones hold nothing.

    ``images``: those in messages are read, and those in the column ``image_key``.
    """
    for column, value in row.items():
        if column == image_key:
            continue
        if column in COLUMNS and value is not None and not (isinstance(value, Sequence | Mapping) and not value):
            yield column, f"the column {column}"
        elif (kind := kind_in_messages(value, images=images)) is not None:
            yield column, f"messages with a part of the type {kind} in the column {column}"
