"""vLLM itself, in the environment that ``make engine-vllm`` builds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.rollout.process import ProcessEngine
from tandem.rollout.spec import EngineSpec
from tests.engines.models import KNOWN, model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of that environment."""
    python = Path(os.environ.get("TANDEM_VLLM", ROOT / ".engines" / "vllm" / "bin" / "python"))
    if not python.is_file():
        pytest.skip(f"vLLM has no environment here ({python}): run `make engine-vllm`")
    return str(python)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(vllm_python: str, folder: Path) -> Iterator[ProcessEngine]:
    """One that waits for its first weights."""
    spec = EngineSpec(
        model=str(folder),
        engine="vllm",
        python=vllm_python,
        version=-1,
        threads=1,
        max_num_seqs=12,
        context=128,
        tokens=KNOWN,
    )
    with ProcessEngine("rollout-0", spec, start_s=200.0, deadline_s=60.0) as engine:
        yield engine
