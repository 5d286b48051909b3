"""Requests with one prompt, whatever begins, draws or is given up: one at a time computes it, and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.rollout.cores.shared_prompts import SharedPrompts


def test_the_others_are_taken_once_the_first_has_drawn() -> None:
    waiting: SharedPrompts[str] = SharedPrompts()
    for key in ("a0", "a1", "b0", "a2"):
        waiting.add(key, key[0], key)
    assert waiting.take() == ["a0", "b0"]
    assert waiting.take() == []
    waiting.begun("b0")
    assert waiting.take() == []
    waiting.begun("a0")
    assert waiting.take() == ["a1", "a2"]
    waiting.begun("a1")
    waiting.add("a3", "a", "a3")
    assert waiting.take() == ["a3"]


def test_if_the_first_is_given_up_another_is_the_first() -> None:
    waiting: SharedPrompts[str] = SharedPrompts()
    for key in ("a0", "a1", "a2"):
        waiting.add(key, "a", key)
    assert waiting.take() == ["a0"]
    assert not waiting.remove("a0")  # the engine has it
    assert waiting.take() == ["a1"]
    assert waiting.remove("a2")
    waiting.begun("a1")
    assert waiting.take() == []


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "begun", "remove"]), st.integers(0, 30)), max_size=60))
def test_every_request_is_taken_once_or_given_up(events: list[tuple[str, int]]) -> None:
    waiting: SharedPrompts[int] = SharedPrompts()
    count, outside, inside = 0, set(), set()
    for kind, which in events:
        if kind == "add":
            waiting.add(str(count), which % 3, count)
            outside.add(count)
            count += 1
        elif kind == "take":
            taken = waiting.take()
            assert len(set(taken)) == len(taken) and set(taken) <= outside
            inside |= set(taken)
            outside -= set(taken)
        elif kind == "begun" and inside:
            one = sorted(inside)[which % len(inside)]
            waiting.begun(str(one))
        elif kind == "remove" and inside | outside:
            one = sorted(inside | outside)[which % len(inside | outside)]
            assert waiting.remove(str(one)) == (one in outside)
            inside.discard(one)
            outside.discard(one)
    for _ in range(count + 1):
        taken = waiting.take()
        inside |= set(taken)
        outside -= set(taken)
        for one in inside:
            waiting.begun(str(one))
    assert outside == set()
