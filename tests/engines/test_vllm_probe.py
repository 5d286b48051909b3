"""The probe on vLLM itself: what it packs apart is seen, whatever its fingerprint says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import TandemError
from tandem.models.fingerprint import fingerprint
from tandem.rollout.process import ProcessEngine
from tandem.rollout.spec import EngineSpec
from tests.engines.models import new_model, weights
from tests.roles.test_probing import Asked, push

pytestmark = pytest.mark.vllm


def start(folder: Path, python: str, engine: str) -> ProcessEngine:
    spec = EngineSpec(
        model=str(folder),
        engine=engine,
        plugins=("tests.engines.forgetful",) if engine != "vllm" else (),
        python=python,
        version=-1,
        threads=1,
        max_num_seqs=12,
        context=128,
    )
    return ProcessEngine("rollout-0", spec, start_s=200.0, deadline_s=60.0)


def test_a_push_of_the_very_weights_it_was_started_for_shows_a_head_that_it_does_not_take_over(
    vllm_python: str, folder: Path
) -> None:
    with start(folder, vllm_python, "test_forgetful") as engine:
        assert engine.load(weights(0), 2) == fingerprint(weights(0))  # which shows nothing
        receiver: Any = Asked(engine)  # type: ignore[arg-type]
        with pytest.raises(TandemError, match="does not generate with weights version 3") as caught:
            push(new_model(0), receiver, 0.7)
        print(caught.value)


def test_the_engine_as_it_is_passes_at_every_push(vllm_python: str, folder: Path) -> None:
    with start(folder, vllm_python, "vllm") as engine:
        receiver: Any = Asked(engine)  # type: ignore[arg-type]
        push(new_model(0), receiver, 0.7)
        push(new_model(1), receiver, 1.3)
