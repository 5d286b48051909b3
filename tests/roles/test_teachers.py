"""Teachers on the actor's ranks: as tags and as models beside it, on one rank and on two; rows and their teachers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import ContractError, DataError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.roles.teachers import TeacherStage
from tandem.roles.train_rank import TrainRank
from tandem.train.engine import FsdpEngine
from tandem.train.protocol import TopTokens, Wanted
from tests.roles.rank_processes import group_of
from tests.train.conftest import LLAMA, VOCAB, build_batch, build_engine

LENGTHS = [7, 2, 30, 4, 9, 1, 12, 5]
TOP = TopTokens(4, VOCAB)
WIDE = {**LLAMA, "hidden_size": 24, "num_hidden_layers": 1}


def engine(mesh: DeviceMesh | None = None) -> FsdpEngine:
    return build_engine(mesh=mesh, max_tokens=40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of the actor's shape with other weights, and one of another shape."""
    root = tmp_path_factory.mktemp("teachers")
    for name, shape in (("same", LLAMA), ("wide", WIDE)):
        save_pretrained_atomic(new_model(shape, seed=3), None, root / name)
    return {name: root / name for name in ("same", "wide")}


@pytest.mark.parametrize("world", [0, 2])
def test_both_score_as_the_model_itself_does_and_the_actor_is_back_afterwards(
    world: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    batch = build_batch(LENGTHS)
    tolerance: dict[str, float] = {"atol": 1e-5, "rtol": 1e-5} if world else {"atol": 0.0, "rtol": 0.0}
    with group_of(world, engine, tmp_path) as group:
        own = group.forward(batch, ["logprobs"])["logprobs"].values
        group.call(TrainRank.load_tag, "teacher", str(folders["same"]))
        group.call(TrainRank.load_beside, "beside", str(folders["same"]))
        group.call(TrainRank.load_beside, "wide", str(folders["wide"]))
        for name, shape in (("teacher", LLAMA), ("beside", LLAMA), ("wide", WIDE)):
            alone = build_engine(shape, seed=3, max_tokens=40).forward(batch, ["logprobs", TOP])
            for want in (["logprobs"], [TOP]):
                for key, found in group.forward(batch, want, name).items():
                    torch.testing.assert_close(found.values, alone[key].values, **tolerance)
        assert torch.equal(group.forward(batch, ["logprobs"])["logprobs"].values, own)
        assert all(rank.in_place == "actor" and "teacher" in rank.tags for rank in group.every(TrainRank.status))
        one = batch[[3]]  # fewer rows than ranks
        short = group.forward(one, [TOP], "wide")["top_ids"]
        assert torch.equal(short.values, build_engine(WIDE, seed=3).forward(one, [TOP])["top_ids"].values)


def test_a_model_of_another_shape_is_no_tag(folders: dict[str, Path], tmp_path: Path) -> None:
    with group_of(0, engine, tmp_path) as group, pytest.raises(DataError, match=r"wide.*embed_tokens.*\(23, 24\)"):
        group.call(TrainRank.load_tag, "teacher", str(folders["wide"]))


def test_the_actors_own_tag_cant_be_filled(tmp_path: Path) -> None:
    with group_of(0, engine, tmp_path) as group, pytest.raises(ContractError, match="live"):
        group._ranks[0].rank.weights.put("actor", {})  # type: ignore[attr-defined]


# -- rows and their teachers --


def answering(number: float, asked: list[int]) -> Any:
    """A teacher that gives every token the log-prob ``number`` plus a hundredth of its id."""

    def forward(batch: DataProto, want: Sequence[Wanted]) -> dict[str, Ragged]:
        asked.append(len(batch))
        responses = batch.ragged("responses")
        return {"logprobs": responses.like(number + responses.values / 100)}

    return forward


def with_sources(sources: list[str]) -> DataProto:
    batch = build_batch(LENGTHS[: len(sources)])
    batch.non_tensor_batch["data_source"] = list(sources)
    return batch


def test_each_row_is_scored_by_its_own_and_stays_where_it_is() -> None:
    asked: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    forwards = {name: answering(-i - 1.0, asked[name]) for i, name in enumerate(asked)}
    stage = TeacherStage(forwards, {"x": "a", "y": "b", "z": "a"}, "c", "logprobs")
    batch = with_sources(["y", "x", "other", "z", "y", "x"])
    scored = stage(batch).ragged("teacher_logprobs")
    for row, number in enumerate([-2.0, -1.0, -3.0, -1.0, -2.0, -1.0]):
        expected = number + batch.ragged("responses").row(row) / 100
        torch.testing.assert_close(scored.row(row), expected)
    assert asked == {"a": [3], "b": [2], "c": [1]}


def test_one_teacher_for_all_needs_no_source() -> None:
    asked: list[int] = []
    stage = TeacherStage({"a": answering(-1.0, asked)}, {}, "a", "logprobs")
    assert "teacher_logprobs" in stage(build_batch([3, 4])).columns and asked == [2]


def test_a_row_without_a_teacher_is_named() -> None:
    stage = TeacherStage({"a": answering(-1.0, [])}, {"x": "a"}, None, "logprobs")
    with pytest.raises(DataError, match=r"sample 1 is of the data source 'w'.*by_source.*teacher.path"):
        stage(with_sources(["x", "w"]))
