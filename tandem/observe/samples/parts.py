"""The files of a run's samples: a part for each step and kind, whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tandem.base.folders import flush
from tandem.base.run_folder import SAMPLES, part_of_samples

Kind = Literal["train", "eval"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_SCRATCH = ".partial"


@dataclass(frozen=True, order=True)
class Part:
    """A file of samples: those that ``step`` trained on, or the evaluation after it."""

    kind: Kind
    step: int
    path: Path


def parts_in(output_dir: Path) -> list[Part]:
    """List the parts of the run in ``output_dir`` by kind and step; none where it keeps no samples."""
    return sorted(_parts(output_dir / SAMPLES))


def _parts(folder: Path) -> Iterator[Part]:
    names = os.listdir(folder) if folder.is_dir() else []
    for name in names:
        kind, step = part_of_samples(name) or ("", 0)
        if kind in KINDS:
            yield Part("train" if kind == "train" else "eval", step, folder / name)


def write_part(output_dir: Path, kind: Kind, step: int, table: pa.Table) -> tuple[Part, int]:
    """Write a part, and return it with its bytes.

    It is on the disk, whole, when it has its name; one of the same name is replaced.
    """
    folder = output_dir / SAMPLES
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}-{step:08d}.parquet"
    beside = path.with_name(f".{path.name}{_SCRATCH}")
    pq.write_table(table, beside, compression="zstd")
    flush(beside)
    os.replace(beside, path)
    return Part(kind, step, path), path.stat().st_size


def cut_in(output_dir: Path) -> list[Path]:
    """List what killed runs were writing."""
    return sorted((output_dir / SAMPLES).glob(f".*{_SCRATCH}"))
