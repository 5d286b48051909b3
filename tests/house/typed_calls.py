"""Calls of ranks that can't be written: the type checker reads this file, nothing runs it.

Each line with an ``ignore`` is an error today. The checker also reports an ``ignore`` that nothing needs, so a call
that it came to accept fails ``make check``.
"""

from tandem.roles.rank_calls import call
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.runtime.ray.ranks import RayTrainRank


def calls(local: TrainGroup[TrainRank]) -> None:
    """What the protocol has, and what it has not."""
    local.call(TrainRank.save_tag, "ref")
    local.call(TrainRank.save_tags, "ref")  # type: ignore[attr-defined]
    local.call(TrainRank.save_tag)  # type: ignore[call-arg]
    local.call(TrainRank.save_tag, 3)  # type: ignore[arg-type]
    local.call("save_tag", "ref")  # type: ignore[arg-type]
    norm: str = local.call(TrainRank.optim_step, 1.0).grad_norm  # type: ignore[assignment]
    del norm
    call(TrainRank.optim_step, denominators=1.0)  # type: ignore[call-arg]


def what_only_ray_has(local: TrainGroup[TrainRank], on_ray: TrainGroup[RayTrainRank]) -> None:
    """A group of ranks on Ray does what every group does; the other way round it doesn't."""
    on_ray.call(TrainRank.save_tag, "ref")
    on_ray.call(RayTrainRank.put_bucket, 1, None)
    local.call(RayTrainRank.put_bucket, 1, None)  # type: ignore[arg-type]
    every_group: TrainGroup[TrainRank] = on_ray
    ray_group: TrainGroup[RayTrainRank] = local  # type: ignore[assignment]
    del every_group, ray_group
