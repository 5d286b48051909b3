"""An engine of another environment on Ray: its process is the actor's, and answers as one here does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.base.errors import ContractError, EngineDiedError, TandemError
from tandem.models.fingerprint import fingerprint
from tandem.models.loading import load_causal_lm
from tandem.plan.parts.placement import Placement
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import Sampling
from tandem.rollout.spec import EngineSpec
from tandem.runtime.ray.engine import RayEngine
from tandem.runtime.ray.processes import RayRuntime
from tests.rollout.process_engines import order
from tests.rollout.tiny_models import llama, requests, tokens

SAMPLING = Sampling(n=2, max_tokens=8, stop_token_ids=(0, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runtime(cluster: None) -> Iterator[RayRuntime]:
    runtime = RayRuntime.start((Placement("rollout", "rollout", 1, 1),))
    yield runtime
    runtime.close()


def start(runtime: RayRuntime, model: Path, python: str, engine: str = "test_elsewhere") -> RayEngine:
    spec = EngineSpec(
        model=str(model),
        engine=engine,
        plugins=("tests.rollout.process_engines",),
        python=python,
        max_num_seqs=4,
        threads=1,
    )
    (found,) = runtime.engines("rollout", spec, deadline_s=30.0, bucket_bytes=4096)
    return found


def test_it_generates_loads_refuses_and_dies_as_an_engine_of_this_environment(
    runtime: RayRuntime, model: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nELSEWHERE=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    engine = start(runtime, model, str(python))
    here = HfEngine(load_causal_lm(model), max_num_seqs=4)
    assert tokens(list(engine.generate(requests(5), SAMPLING))) == tokens(list(here.generate(requests(5), SAMPLING)))
    for version in (1, 2):
        sent = dict(llama(version).named_parameters())
        assert engine.load(sent.items(), version) == fingerprint(sent.items())
        here.load(sent.items(), version)
        found = list(engine.generate(requests(3), SAMPLING))
        assert tokens(found) == tokens(list(here.generate(requests(3), SAMPLING)))
        assert {int(v) for o in found for s in o.samples for v in s.versions} == {version}
    with pytest.raises(ContractError, match="max_num_seqs"):
        list(engine.generate([order(3)], Sampling(n=9, max_tokens=1)))
    (process,) = psutil.Process(engine.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="rollout-0"):
        list(engine.generate(requests(1), SAMPLING))
    engine.close()


def test_a_start_that_fails_elsewhere_says_why(runtime: RayRuntime, model: Path) -> None:
    engine = start(runtime, model, sys.executable)
    with pytest.raises(TandemError, match=r"can't start.*is not elsewhere"):
        engine.wait_until_ready()
    engine.close()
