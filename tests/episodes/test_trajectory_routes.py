"""Tokens of an episode keep the routes of when they were drawn; what others wrote gets those of the next turn."""

from __future__ import annotations

import torch

from tandem.episodes.trajectory import Trajectory
from tandem.rollout.protocol import SampleOutput


def turn(ids: list[int], routes: list[int]) -> SampleOutput:
    """A sampled turn; one byte a token."""
    count = len(ids)
    return SampleOutput(
        torch.tensor(ids), torch.zeros(count), torch.zeros(count, dtype=torch.int32), "stop", bytes_of(routes)
    )


def bytes_of(routes: list[int]) -> torch.Tensor:
    return torch.tensor(routes, dtype=torch.uint8)[:, None]


def routes_of(path: Trajectory) -> tuple[list[int], list[int]]:
    row = path.columns(routes=1)
    return row["prompt_routes"][:, 0].tolist(), row["routes"][:, 0].tolist()


def test_a_turn_fills_what_has_no_record_and_changes_none() -> None:
    path = Trajectory([1, 2])
    path.sample(turn([3, 4], [30, 255]), bytes_of([10, 20]))
    assert routes_of(path) == ([10, 20], [30, 255])
    path.insert([5, 6])
    path.sample(turn([7, 8], [70, 255]), bytes_of([11, 21, 31, 41, 51, 61]))
    assert routes_of(path) == ([10, 20], [30, 41, 51, 61, 70, 255])
    path.insert([9])
    assert routes_of(path.until_sampled()) == ([10, 20], [30, 41, 51, 61, 70, 255])


def test_a_context_that_begins_anew_has_routes_of_its_own() -> None:
    path = Trajectory([1, 2])
    path.sample(turn([3, 4], [30, 255]), bytes_of([10, 20]))
    path.insert([5, 6], anew=True)
    path.sample(turn([7], [255]), bytes_of([50, 60]))
    assert routes_of(path) == ([10, 20], [30, 255, 50, 60, 255])


def test_an_episode_that_never_asked_has_no_record() -> None:
    assert routes_of(Trajectory([1, 2])) == ([255, 255], [])
