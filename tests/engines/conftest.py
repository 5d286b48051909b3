"""The engines of other packages, in the environments that ``make engine-vllm`` and ``make engine-sglang`` build."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tandem.rollout.process import ProcessEngine
from tandem.rollout.spec import EngineSpec
from tests.engines.models import KNOWN, model

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """An engine and the interpreter of its environment."""

    name: str
    python: str
    folder: Path

    @property
    def spec(self) -> EngineSpec:
        """One that waits for its first weights."""
        return EngineSpec(
            model=str(self.folder),
            engine=self.name,
            python=self.python,
            version=-1,
            threads=1,
            max_num_seqs=12,
            context=128,
            tokens=KNOWN,
        )

    def start(self, **changes: object) -> ProcessEngine:
        """A process of it."""
        return ProcessEngine("rollout-0", replace(self.spec, **changes), start_s=280.0, deadline_s=60.0)  # type: ignore[arg-type]


def python_of(name: str) -> str:
    """The interpreter of an engine's environment; skips the test without one."""
    python = Path(os.environ.get(f"TANDEM_{name.upper()}", ROOT / ".engines" / name / "bin" / "python"))
    if not python.is_file():
        pytest.skip(f"{name} has no environment here ({python}): run `make engine-{name}`")
    return str(python)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model(0).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return python_of("vllm")


BOTH = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]


@pytest.fixture(scope="session", params=BOTH)
def installed(request: pytest.FixtureRequest, folder: Path) -> Installed:
    """Each engine that is installed, in turn."""
    return Installed(request.param, python_of(request.param), folder)


@pytest.fixture(scope="module")
def engine(installed: Installed) -> Iterator[ProcessEngine]:
    """One that waits for its first weights."""
    with installed.start() as engine:
        yield engine
