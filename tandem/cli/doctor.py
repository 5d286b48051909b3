"""``tandem doctor``: what this machine and this environment have. Works without torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator

from tandem.base.machine import physical_memory

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "pyarrow", "pydantic", "typer", "rich")

OPTIONAL = {
    "tensorboard": ("tracking", "the logger tensorboard"),
    "wandb": ("wandb", "the logger wandb"),
    "mlflow": ("mlflow", "the logger mlflow"),
    "trackio": ("trackio", "the logger trackio"),
    "swanlab": ("swanlab", "the logger swanlab"),
    "math_verify": ("math", "the reward math"),
    "reasoning_gym": ("tasks", "procedural tasks"),
    "gguf": ("smollm2", "tandem models fetch"),
    "accelerate": ("smollm2", "tandem models fetch"),
    "ray": ("ray", "several devices"),
}
"""Module -> the extra that brings it, and what it is for."""

_ENGINES = ("vllm", "sglang")


def examine() -> str:
    """Return the report, a line a fact."""
    return "\n".join([*_machine(), *_versions(), *_devices(), *_missing()])


def _machine() -> Iterator[str]:
    yield f"tandem        {version_of('tandem-rl') or 'not installed as a package'}"
    yield f"python        {platform.python_version()} ({sys.executable})"
    yield f"system        {platform.system()} {platform.machine()}"
    yield f"processors    {usable_processors()} usable of {os.cpu_count()}"
    threads = os.environ.get("OMP_NUM_THREADS")
    yield f"threads       OMP_NUM_THREADS {'is not set: one per processor' if threads is None else f'= {threads}'}"
    memory = physical_memory()
    yield f"memory        {'unknown' if memory is None else f'{memory / 2**30:.1f} GiB'}"
    yield f"disk here     {shutil.disk_usage(os.getcwd()).free / 2**30:.1f} GiB free"


def usable_processors() -> int:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _versions() -> Iterator[str]:
    for name in NEEDED:
        found = version_of(name)
        yield f"{name:<13} {found}" if found else f"{name:<13} MISSING: pip install {name}"


def _devices() -> Iterator[str]:
    if importlib.util.find_spec("torch") is None:
        yield "devices       unknown without torch"
        return
    try:
        import torch
    except Exception as error:  # a broken installation is what this command is for
        yield f"devices       unknown: importing torch fails: {type(error).__name__}: {error}"
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"device {index}      {properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    else:
        yield f"devices       CPU only, {torch.get_num_threads()} torch threads"


def _missing() -> Iterator[str]:
    for module, (extra, purpose) in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield f"optional      {module} is not installed ({purpose}): pip install 'tandem-rl[{extra}]'"
        else:
            yield f"optional      {module} {version_of(module.replace('_', '-')) or ''} ({purpose})"
    for engine in _ENGINES:
        here = importlib.util.find_spec(engine) is not None
        found = f"{engine} {version_of(engine) or ''} is installed here; " if here else ""
        way = f"make engine-{engine}, then rollout.python (docs/engines.md)"
        yield f"optional      {found}the engine {engine} lives in an environment of its own: {way}"


def version_of(package: str) -> str | None:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
