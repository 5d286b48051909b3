"""What shows that an engine generates with the weights that it was sent. Silence doesn't."""

from __future__ import annotations

import pytest

from tandem.base.errors import TandemError
from tests.weights.test_sync import FakeEngine, Trainer


class Silent(FakeEngine):
    """Takes the weights, or not, and doesn't say."""

    def load(self, *_: object) -> None: ...


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_answers_no_fingerprint_is_refused_at_the_first_push(overlap: bool) -> None:
    trainer = Trainer()
    sync = trainer.sync({"rollout-0": FakeEngine(), "rollout-1": Silent()}, overlap=overlap)
    with pytest.raises(TandemError, match=r"rollout-1 answered no fingerprint to weights version 0.*load\(\) copy"):
        sync.push(0)
        sync.wait()
    assert [name for name, _ in trainer.acknowledged] == ["rollout-0"]
