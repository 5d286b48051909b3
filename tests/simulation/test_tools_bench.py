"""Tools that take their time leave the engine to other episodes."""

from __future__ import annotations

from bench.simulate_tools import measure


def test_an_engine_is_busy_while_episodes_wait_for_tools_if_there_are_others() -> None:
    without, with_tools, alone = (
        measure(tools=tools, at_a_time=groups, count=48) for tools, groups in ((False, 32), (True, 32), (True, 8))
    )
    assert without.tokens == with_tools.tokens == alone.tokens
    assert with_tools.utilization >= 0.9 * without.utilization > 0.8
    assert alone.utilization < 0.7 * without.utilization
