"""Named tensors + a JSON value on disk and as bytes: safetensors and JSON, never pickle."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from tandem.base.errors import DataError
from tandem.base.folders import flush
from tandem.columns import plain_json

_FORMAT = "tandem-columns/1"
_HEADER = "data.json"


def write_folder(folder: Path, tensors: Mapping[str, Tensor], header: Any) -> None:
    """Write ``folder/data.json`` and the tensor file that it names.

    Atomic, also over an older save: the tensors get a new name, and renaming ``data.json`` over the old one is the one
    moment at which the new data exists. A process that dies before leaves the old data whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"columns-{uuid.uuid4().hex}.safetensors"
    text = plain_json.dumps({"format": _FORMAT, "tensors": name, "header": header}, "the header")
    _write(folder / name, safetensors.torch.save(_unshared(tensors)))
    temporary = folder / f"{name}.json"
    _write(temporary, text.encode("ascii"))
    os.replace(temporary, folder / _HEADER)
    flush(folder)
    for stale in folder.glob("columns-*"):
        if stale.name != name:
            stale.unlink(missing_ok=True)


def read_folder(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """Return what ``write_folder`` wrote; raises ``DataError`` naming the file if it isn't there or isn't whole."""
    path = folder / _HEADER
    if not path.is_file():
        raise DataError(f"{path}: no such file, so {folder} holds no saved DataProto")
    try:
        content = plain_json.loads(path.read_bytes())
        header, tensor_file = _checked(content, str(path)), folder / content["tensors"]
        return safetensors.torch.load_file(tensor_file), header
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path}: not a whole save: {error}") from error


def to_bytes(tensors: Mapping[str, Tensor], header: Any) -> bytes:
    """Return the length of the JSON (8 bytes, little-endian), the JSON, the safetensors bytes."""
    text = plain_json.dumps({"format": _FORMAT, "header": header}, "the header").encode("ascii")
    return b"".join((len(text).to_bytes(8, "little"), text, safetensors.torch.save(_unshared(tensors))))


def from_bytes(data: bytes) -> tuple[dict[str, Tensor], Any]:
    """Return what ``to_bytes`` was given; raises ``DataError`` if the bytes are cut short or something else."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = _checked(plain_json.loads(data[8 : 8 + length]), "bytes")
        return safetensors.torch.load(data[8 + length :]), header
    except (ValueError, SafetensorError) as error:
        raise DataError(f"bytes: not a whole DataProto ({len(data)} bytes): {error}") from error


def _checked(content: Any, where: str) -> Any:
    if not isinstance(content, dict) or "format" not in content or content["format"] != _FORMAT:
        raise DataError(f"{where}: not of the format {_FORMAT}")
    return content["header"]


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous, each in memory of its own: safetensors refuses tensors that share a
    storage.
    """
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        own[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return own


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    flush(path)
