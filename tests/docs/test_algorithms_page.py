"""The page of algorithms says what the registries say."""

from __future__ import annotations

from tandem.algorithms import ADVANTAGES, KL_CONTROLLERS, KL_TYPES, POLICY_LOSSES
from tandem.base.registry import Scope
from tandem.reward.registry import REWARDS
from tools.algorithms_page import TARGET, own, page, papers


def test_the_page_in_the_repository_is_current() -> None:
    assert TARGET.read_text("utf-8") == page(), "run `python tools/algorithms_page.py`"


def test_every_entry_is_on_the_page() -> None:
    text = page()
    for registry in (ADVANTAGES, POLICY_LOSSES, KL_TYPES, REWARDS):
        for name in registry:
            if registry[name].target.__module__.startswith("tandem."):
                assert f"| `{name}` | " in text, name


def test_what_a_plugin_registered_is_not_on_the_page() -> None:
    def surprising(token_rewards: object) -> None:
        """Not Tandem's."""

    ADVANTAGES.register("surprising", scope=Scope.TOKEN)(surprising)  # type: ignore[arg-type]
    try:
        assert "surprising" not in page()
    finally:
        del ADVANTAGES._entries["surprising"]


def test_every_entry_says_when_to_use_it_and_the_library_where_it_comes_from() -> None:
    for registry in (ADVANTAGES, POLICY_LOSSES, KL_TYPES, KL_CONTROLLERS):
        for entry in own(registry):
            assert len(str(entry.traits["use_when"])) > 8, entry.name
    for registry in (ADVANTAGES, POLICY_LOSSES):
        for entry in own(registry):
            assert papers(entry).startswith("arXiv "), entry.name
