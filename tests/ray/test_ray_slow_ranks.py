"""Ranks whose models take long to load: the limit is that of the run's waits, which a config can raise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.remote import calls
from tandem.runtime.ray import ranks


class FakeRay:
    """A cluster whose actors answer each call at once; it remembers how long each answer was waited for."""

    exceptions = SimpleNamespace()

    def __init__(self) -> None:
        self.waited: dict[str, float | None] = {}

    def remote(self, **options: Any) -> Any:
        return lambda kind: self

    def options(self, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda *arguments: FakeActor())

    def get(self, call: str, timeout: float | None) -> Any:
        self.waited[call] = timeout
        return ("127.0.0.1", 1) if call == "open_meeting" else 7


class FakeActor:
    """Its calls are told by their names."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: name)


def test_a_model_may_take_as_long_to_load_as_a_wait_of_the_run_may_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    for module in (calls, ranks):
        monkeypatch.setattr(module, "import_ray", lambda: ray)
    slots: list[Any] = [SimpleNamespace(options=lambda part: {}, device=str)] * 2
    started = ranks.start_ranks(slots, ranks.RankSetup(print, "cpu", seed=0, meeting_s=1800.0))  # type: ignore[arg-type]
    assert [rank.pid for rank in started] == [7, 7] and ray.waited["build"] == 1800.0
