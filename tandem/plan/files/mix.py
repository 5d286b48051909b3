"""What an SFT config says of its examples: the columns, and the parts of a mix with their shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from tandem.config.schema import DataConfig, MixPartConfig, SftDataConfig
from tandem.data.examples import ExampleColumns
from tandem.data.files import is_united


@dataclass(frozen=True)
class MixShare:
    """A part of a mix: its ``share`` of the examples and its own ``rows``; None where they can't be counted."""

    name: str
    share: float
    rows: int | None


def example_columns(data: SftDataConfig, part: MixPartConfig | None = None) -> ExampleColumns:
    """Return the columns of an example; those that a ``part`` of a mix names replace those of ``data``.

    A part that names a prompt or a response has no conversations, whatever ``data`` says.
    """
    common = ExampleColumns(
        data.messages_key, data.prompt_key, data.response_key, data.chat, data.add_eos, data.tools_key
    )
    if part is None:
        return common
    own: dict[str, Any] = part.model_dump(exclude={"files", "weight", "name"}, exclude_none=True)
    if own.keys() & {"prompt_key", "response_key"}:
        own = {"messages_key": None, **own}
    return replace(common, **own)


def has_united_rows(data: DataConfig | SftDataConfig) -> bool:
    """Return whether some rows come by way of Arrow, or may: of parquet and the like, or of a source of the user's."""
    mixed = [file for part in data.mix for file in part.files] if isinstance(data, SftDataConfig) else []
    files = [*data.train_files, *data.val_files, *mixed]
    return data.source is not None or any(map(is_united, files))


def mix_names(data: SftDataConfig) -> list[str]:
    """Return what the parts of the mix are called."""
    return [part.name or PurePath(*part.files[:1]).stem for part in data.mix]
