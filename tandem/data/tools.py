"""Definitions of tools as rows give them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.data.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]


def read_tools(row: Row, key: str | None) -> Tools | None:
    """Return the tool definitions of a row: a list of mappings, or JSON text of the list or of each; none where it is
    null.
    """
    if key is None or row.find(key) is None:
        return None
    value = row.nested(key)
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, list):
            value = [json.loads(tool) if isinstance(tool, str) else tool for tool in value]
    except (ValueError, RecursionError) as error:
        raise row.bad("no tools", f"column {key!r} is text, but no JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise row.bad("no tools", f"column {key!r} is {str(value)[:60]!r}: write a list of tool definitions")
    return value


def require_place_for_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``DataError`` if the chat template would leave tool definitions out in silence."""
    if "tools" not in str(tokenizer.chat_template or ""):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path!r} has no place for tools: use the model's own template "
            "for tools (as data.chat_template), or leave tools_key out"
        )
