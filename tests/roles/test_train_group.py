"""Several ranks are one actor: same results, same weights, and whoever waits for a lost rank hears of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import ContractError, DeadlineError, DiedError
from tandem.columns.proto import DataProto
from tandem.roles.rank_calls import Call, Done
from tandem.roles.train_group import RankError, TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.train import checkpoint
from tandem.train.engine import FsdpEngine
from tandem.train.objective import PolicyObjective
from tandem.train.protocol import Wanted
from tests.roles.rank_processes import group_of, rank_processes
from tests.train.conftest import GPT2, build_batch, build_engine

OBJECTIVE = PolicyObjective(aggregation="seq-mean-token-mean", kl_coef=0.1, entropy_coef=0.01)
WANT: Sequence[Wanted] = ["logprobs", "entropies"]


def build(mesh: DeviceMesh | None, **options: Any) -> FsdpEngine:
    return build_engine(mesh=mesh, **{"max_tokens": 40, **options})


def train(group: TrainGroup, batch: DataProto, steps: int = 3) -> list[tuple[float, float, float]]:
    """(loss, KL, norm of the gradient) of each step."""
    seen = []
    for _ in range(steps):
        total = group.forward_backward(batch, OBJECTIVE)
        result = group.call(TrainRank.optim_step, OBJECTIVE.denominator(batch))
        assert result.applied
        seen.append((float(total.loss), total.metrics["kl"].mean, result.grad_norm))
    return seen


def weights(group: TrainGroup) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in group.export()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def shuffled(batch: DataProto, seed: int = 0) -> DataProto:
    return batch.reorder(torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("lengths", [[7, 2, 30, 4, 9, 1, 12, 5, 3], [7, 2, 30], [5]], ids=["nine", "b64_three", "one"])
def test_b64_two_ranks_train_as_one(tmp_path: Path, lengths: list[int]) -> None:
    """Whatever number of samples, in whatever order; float64, so that what is left is the order of sums."""
    batch = shuffled(build_batch(lengths, group_size=3))
    double = partial(build, shape=GPT2, double=True)
    with group_of(0, double, tmp_path) as one, group_of(2, double, tmp_path / "two", balance=True) as two:
        for _ in range(2):
            expected, found = (group.forward(batch, WANT) for group in (one, two))
            for name in expected:
                assert torch.equal(found[name].offsets, batch.ragged("responses").offsets)
                torch.testing.assert_close(found[name].values, expected[name].values, atol=1e-6, rtol=1e-6)
            assert train(two, batch) == [pytest.approx(step, rel=1e-6) for step in train(one, batch)]
        mine = weights(two)
        for name, tensor in weights(one).items():
            torch.testing.assert_close(mine[name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("lengths", [[91] * 5 + [16] * 5, [16] * 5 + [91] * 5, [30, 2, 2, 2, 30]])
def test_b61_ranks_with_different_numbers_of_micro_batches_end(tmp_path: Path, lengths: list[int]) -> None:
    batch = build_batch(lengths, group_size=1)
    with group_of(2, partial(build, max_tokens=100), tmp_path) as group:
        assert len(group.forward(batch, ["logprobs"])["logprobs"]) == len(lengths)
        train(group, batch, steps=1)
        imbalance = group.take_imbalance()
        assert imbalance is not None and imbalance > 1.0
        assert group.take_imbalance() is None


def test_exact_forwards_are_bit_equal_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Groups stay whole, so each is computed alone and alike."""
    batch = shuffled(build_batch([7, 2, 30, 4, 9, 1, 12, 5, 3], group_size=3))
    exact = partial(build, exact=True)
    with group_of(0, exact, tmp_path) as one, group_of(2, exact, tmp_path / "two", whole_groups=True) as two:
        expected, found = (group.forward(batch, ["logprobs"])["logprobs"].values for group in (one, two))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("world", [1, 2])
def test_weight_tags_switch_bit_exactly(tmp_path: Path, world: int) -> None:
    batch = build_batch([4, 6, 3])
    with group_of(world, build, tmp_path) as group:
        group.call(TrainRank.save_tag, "ref")
        reference, original = group.forward(batch, WANT, "ref"), weights(group)
        train(group, batch)
        trained, under_actor = weights(group), group.forward(batch, WANT)
        assert not same_bits(trained, original)
        for name, values in group.forward(batch, WANT, "ref").items():
            assert torch.equal(values.values, reference[name].values)
        for name, values in group.forward(batch, WANT).items():
            assert torch.equal(values.values, under_actor[name].values)
        assert same_bits(weights(group), trained)
        group.call(TrainRank.save_tag, "actor")
        group.call(TrainRank.save_tag, "ref")
        for name, values in group.forward(batch, WANT, "ref").items():
            assert torch.equal(values.values, under_actor[name].values)
        assert [status.in_place for status in group.every(TrainRank.status)] == ["actor"] * world


def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    """Weights, moments and tags: each rank holds only a part of a tag."""
    batch, root = build_batch([7, 2, 5, 3]), tmp_path / "checkpoints"
    double = partial(build, shape=GPT2, double=True)
    with group_of(2, double, tmp_path / "two") as two:
        two.call(TrainRank.save_tag, "ref")
        two.call(TrainRank.save_tag, "old_actor")
        train(two, batch)
        saved = two.call(TrainRank.save_checkpoint, root, 3, {"cursor": 5}, 1)
        assert saved.read() == {"cursor": 5}
        reference, before = two.forward(batch, WANT, "ref"), weights(two)
        straight = train(two, batch)
    with group_of(0, partial(double, seed=5), tmp_path) as one:
        one.call(TrainRank.save_tag, "ref")
        one.call(TrainRank.load_checkpoint, saved.path)
        assert same_bits(weights(one), before)
        for name, values in one.forward(batch, WANT, "ref").items():
            torch.testing.assert_close(values.values, reference[name].values, atol=1e-6, rtol=1e-6)
        assert train(one, batch) == [pytest.approx(step, rel=1e-6) for step in straight]
    again = checkpoint.open_checkpoint(saved.path)
    with group_of(2, partial(double, seed=6), tmp_path / "again") as two:
        two.call(TrainRank.save_tag, "ref")
        two.call(TrainRank.load_checkpoint, again.path)
        assert same_bits(weights(two), before)


def test_ranks_are_processes_and_export_what_they_hold(tmp_path: Path) -> None:
    with group_of(0, build, tmp_path) as one, group_of(2, build, tmp_path / "two") as two:
        status = two.every(TrainRank.status)
        assert [s.rank for s in status] == [0, 1]
        assert len({s.pid for s in status} | {one.every(TrainRank.status)[0].pid}) == 3
        assert same_bits(dict(two.export(bucket_bytes=1000)), weights(one))
        next(two.export(bucket_bytes=1))  # given up half-way
        assert same_bits(weights(two), weights(one))


def test_an_export_goes_on_in_the_background_while_forwards_run(tmp_path: Path) -> None:
    batch = build_batch([4, 6, 3])
    with group_of(2, build, tmp_path, deadline_s=40) as group:
        expected, exports = weights(group), list[dict[str, torch.Tensor]]()
        thread = threading.Thread(target=lambda: exports.extend(weights(group) for _ in range(3)))
        thread.start()
        for _ in range(8):
            group.forward(batch, ["logprobs"])
        thread.join(40)
        assert len(exports) == 3 and all(same_bits(export, expected) for export in exports)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_call_in_seconds(tmp_path: Path, lost: int) -> None:
    batch = build_batch([4, 6, 3, 5])
    with rank_processes(2, build, tmp_path) as ranks:
        group = TrainGroup(ranks, deadline_s=60)
        group.every(TrainRank.status)
        threading.Timer(0.3, ranks[lost].signal, [signal.SIGKILL]).start()
        started = time.monotonic()
        with pytest.raises(DiedError, match=f"rank {lost} .* is gone"):
            while True:
                group.forward(batch, ["logprobs"])
        assert time.monotonic() - started < 10
        with pytest.raises(RankError, match="can't go on"):
            group.forward(batch, ["logprobs"])


def test_a_rank_that_stands_still_is_named_at_the_deadline(tmp_path: Path) -> None:
    batch = build_batch([4, 6, 3, 5])
    with rank_processes(2, build, tmp_path) as ranks:
        TrainGroup(ranks, deadline_s=60).every(TrainRank.status)
        ranks[1].signal(signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"2 ranks of the actor; blocked by rank 1 .*no sign of life"):
            TrainGroup(ranks, deadline_s=1).forward(batch, ["logprobs"])


def test_a_rank_that_refuses_ends_the_call_with_its_reason(tmp_path: Path) -> None:
    """The other one waits for it at a meeting that never takes place."""
    with group_of(2, build, tmp_path) as group:
        with pytest.raises(ContractError, match="a micro-batch holds 40"):
            group.forward(build_batch([4, 60], group_size=1), ["logprobs"])
        with pytest.raises(RankError, match="can't go on"):
            group.every(TrainRank.status)


class _Recording:
    """A rank that notes what arrives, and takes its time over ``sleep``."""

    def __init__(self, name: str) -> None:
        self.name, self.seen, self.arrived = name, list[str](), threading.Event()

    def submit(self, call: Call[TrainRank, Any]) -> Done[None]:
        self.seen.append(call.name)
        if call.name == "sleep":
            self.arrived.set()
            time.sleep(0.2)
        return Done(None)


def test_calls_of_two_threads_reach_all_ranks_in_one_order() -> None:
    """Or each would wait at another meeting."""
    ranks = [_Recording("rank 0"), _Recording("rank 1")]
    group = TrainGroup(ranks, deadline_s=5)
    thread = threading.Thread(target=group.call, args=[TrainRank.sleep])
    thread.start()
    ranks[0].arrived.wait(5)
    group.call(TrainRank.wake)
    thread.join(5)
    assert [rank.seen for rank in ranks] == [["sleep", "wake"]] * 2


class _Failing:
    """A rank whose answers are errors of a kind that isn't Tandem's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, call: Call[TrainRank, Any]) -> _Failing:
        return self

    def result(self, timeout: float | None = None) -> Any:
        raise RuntimeError(f"{self.name} fell over")


def test_foreign_errors_name_all_ranks_that_failed() -> None:
    group = TrainGroup([_Failing("rank 0"), _Failing("rank 1")], deadline_s=5)
    with pytest.raises(RankError, match=r"sleep failed on rank 0: RuntimeError: rank 0 fell over; rank 1: Runtime"):
        group.call(TrainRank.sleep)


def test_an_error_of_the_only_rank_ends_one_call_and_no_more(tmp_path: Path) -> None:
    with group_of(0, build, tmp_path) as group:
        with pytest.raises(ContractError, match="'teacher' was never saved"):
            group.forward(build_batch([3]), ["logprobs"], "teacher")
        assert len(group.forward(build_batch([3]), ["logprobs"])["logprobs"]) == 1
