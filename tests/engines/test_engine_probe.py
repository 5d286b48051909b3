"""The probe on the engines themselves: what vLLM packs apart is seen, whatever its fingerprint says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import TandemError
from tandem.models.fingerprint import fingerprint
from tests.engines.conftest import Installed
from tests.engines.models import new_model, weights
from tests.roles.test_probing import Asked, push


@pytest.mark.vllm
def test_a_push_of_the_very_weights_it_was_started_for_shows_a_head_that_it_does_not_take_over(
    vllm_python: str, folder: Path
) -> None:
    forgetful = Installed("test_forgetful", vllm_python, folder)
    with forgetful.start(plugins=("tests.engines.forgetful",), tokens=None) as engine:
        assert engine.load(weights(0), 2) == fingerprint(weights(0))  # which shows nothing
        receiver: Any = Asked(engine)  # type: ignore[arg-type]
        with pytest.raises(TandemError, match="does not generate with weights version 3") as caught:
            push(new_model(0), receiver, 0.7)
        print(caught.value)


def test_the_engine_as_it_is_passes_at_every_push(installed: Installed) -> None:
    with installed.start(tokens=None) as engine:
        receiver: Any = Asked(engine)  # type: ignore[arg-type]
        push(new_model(0), receiver, 0.7)
        push(new_model(1), receiver, 1.3)
