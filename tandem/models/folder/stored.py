"""What the files of weights in a model's folder say of themselves, by their headers. Importing this costs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.base.regular import regular

LOADED = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The names under which transformers looks for weights, in this order: it takes the first that is there."""

_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
"""What safetensors calls the dtypes whose numbers are the weights themselves."""


def header_of(file: Path) -> dict[str, Any]:
    """Return name -> dtype, shape and place of each tensor: a length in eight bytes, then JSON.

    Raises ``OSError`` or ``ValueError`` for what is no such file.
    """
    with regular(file).open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(min(length, file.stat().st_size)))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {file.name} is no JSON object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def packed_weight(header: Mapping[str, Any]) -> str | None:
    """Say which weight is stored as integers or in 8 bits: its scales are elsewhere, or nowhere; None where none is.

    Tables that a model looks numbers up in are integers rightly: only what is called a matrix or a norm is looked at.
    """
    for name, entry in header.items():
        if name.endswith((".weight", "_proj")) and entry["dtype"] not in _FLOATS:
            return f"{name} is stored as {entry['dtype']}, and weights are trained and pushed in full precision"
    return None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that a model is loaded from: not what else lies beside them. Pickled ones are none.

    A folder without a model's names, such as an adapter's, has all that there are.
    """
    single, index = folder / LOADED[0], folder / LOADED[1]
    if single.is_file():
        return [single]
    if index.is_file():
        return [folder / name for name in sorted(set(_listed(index).values()))]
    return sorted(folder.glob("*.safetensors"))


def faults_of_weights(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, what is wrong with it) for weights that are missing, cut, or there twice; a file's header says how
    long it must be.
    """
    names = {path.name for path in folder.glob("*.safetensors")}
    for index in sorted([*folder.glob("*.safetensors.index.json"), *folder.glob("pytorch_model.bin.index.json")]):
        try:
            names |= set(_listed(index).values())
        except (OSError, ValueError):
            yield index.name, "can't be read"
    if not any((folder / name).is_file() for name in LOADED):
        unread = f", and {min(names)} is not looked at" if names else ""
        yield " or ".join(LOADED[:3]), f"there are no weights in the folder under such a name{unread}"
    for name in sorted(names):
        if fault := _fault_of(folder / name):
            yield name, fault
    if not (folder / LOADED[0]).is_file() and (folder / LOADED[1]).is_file():
        yield from _faults_of_shards(folder)


def _listed(index: Path) -> dict[str, str]:
    """Return tensor -> file by an index. Raises ``OSError`` or ``ValueError`` where it says nothing of the kind."""
    content = json.loads(regular(index).read_text("utf-8"))
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise ValueError(f"{index.name} has no weight_map")
    return {str(tensor): str(name) for tensor, name in listed.items()}


def _faults_of_shards(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the shards that hold a tensor which another one holds too, or that lack one which the index finds there."""
    listed = _listed(folder / LOADED[1])
    held: dict[str, str] = {}
    for file in weight_files(folder):
        for tensor in header_of(file):
            if (other := held.setdefault(tensor, file.name)) != file.name:
                yield file.name, f"holds {tensor}, which {other} holds too: which of the two is meant, no file says"
    for tensor, name in listed.items():
        if tensor not in held and not tensor.endswith("lm_head.weight"):  # a head that is tied need not be there
            yield name, f"has no {tensor}, and {LOADED[1]} finds it there"


def _fault_of(file: Path) -> str | None:
    """Return what is wrong with a safetensors file (eight bytes of length, a JSON header, the tensors); None if nothing
    is.
    """
    try:
        size = file.stat().st_size
        if file.suffix != ".safetensors":
            return None  # whether a pickle is whole, only loading it tells
        with regular(file).open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
        if length > size:
            return f"is cut or no safetensors file: {size} bytes, and its header alone has {length}"
        header = header_of(file)
        ends = [tensor["data_offsets"][1] for tensor in header.values()]
        packed = packed_weight(header)
    except FileNotFoundError:
        return "is missing, and the index lists it"
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return f"can't be read ({error})"
    needed = 8 + length + max(ends, default=0)
    if size != needed:
        return f"is cut: {size} of {needed} bytes" if size < needed else "is too long"
    return packed
