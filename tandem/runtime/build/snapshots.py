"""What takes the actor's weights for those who generate or score with them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tandem.base.device_kinds import device_kind
from tandem.config.schema import Config
from tandem.plan.plan import Plan, Pushed
from tandem.roles.actor import Actor
from tandem.roles.sending import SendingRanks
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.train.protocol import Exported
from tandem.transport.circle import LOOPBACK
from tandem.weights.broadcast import Broadcast, BroadcastSnapshots
from tandem.weights.sync import SharedSnapshots, Snapshot


def local_snapshots(config: Config, plan: Plan, actor: Actor) -> Callable[[], Snapshot]:
    """Return what takes the weights of an actor in this process, and hands them on as the plan says."""
    if plan.transport == "collective":
        assert plan.pushed != "nothing"
        return broadcast_snapshots(config, plan.pushed, actor.ranks, LOOPBACK)
    return snapshots_of(config, plan.pushed, actor)


def snapshots_of(config: Config, pushed: Pushed, actor: Actor) -> SharedSnapshots:
    """Return what copies the weights that are ``pushed`` into shared memory, while training goes on."""
    assert pushed != "nothing"  # an engine on the actor's own weights is sent none
    return SharedSnapshots(
        partial(actor.export, pushed),
        base=partial(actor.ranks.call, TrainRank.base_fingerprint) if pushed == "adapter" else None,
        bucket_bytes=config.execution.weight_sync.bucket_mb << 20,
    )


def broadcast_snapshots(config: Config, part: Exported, ranks: TrainGroup[TrainRank], host: str) -> BroadcastSnapshots:
    """Return what has the ``ranks`` keep the weights and broadcast them; members meet at this process, on ``host``."""
    sync = config.execution.weight_sync
    bucket_bytes = sync.bucket_mb << 20
    kind = device_kind(ranks.call(TrainRank.device_type))
    nccl = kind is not None and kind.collectives == "nccl"
    senders = SendingRanks(ranks, bucket_bytes, sync.deadline_s, part)
    broadcast = Broadcast(
        senders,
        host=host,
        backend="nccl" if nccl else "gloo",
        deadline_s=sync.deadline_s,
        piece_bytes=bucket_bytes,
    )
    base = partial(ranks.call, TrainRank.base_fingerprint) if part == "adapter" else None
    return BroadcastSnapshots(senders, broadcast, base)
