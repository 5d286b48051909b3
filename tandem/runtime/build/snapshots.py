"""What takes the actor's weights for those who generate or score with them elsewhere."""

from __future__ import annotations

from functools import partial

from tandem.config.schema import Config
from tandem.plan.plan import Pushed
from tandem.roles.actor import Actor
from tandem.roles.train_rank import TrainRank
from tandem.weights.sync import SharedSnapshots


def snapshots_of(config: Config, pushed: Pushed, actor: Actor) -> SharedSnapshots:
    """Return what copies the weights that are ``pushed`` into shared memory, while training goes on."""
    assert pushed != "nothing"  # an engine on the actor's own weights is sent none
    return SharedSnapshots(
        partial(actor.export, pushed),
        base=partial(actor.ranks.call, TrainRank.base_fingerprint) if pushed == "adapter" else None,
        bucket_bytes=config.execution.weight_sync.bucket_mb << 20,
    )
