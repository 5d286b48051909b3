"""From the config to what the actors of train ranks are told."""

from __future__ import annotations

from functools import partial

from torch.distributed.device_mesh import DeviceMesh

from tandem.config.schema import Config
from tandem.topology.composite import build_train_engine, load_trainable, model_tokenizer
from tandem.topology.ray_ranks import RankSetup
from tandem.train.engine import FsdpEngine


def rank_setup(config: Config, total_updates: int) -> RankSetup:
    """What the actor's ranks are told. ``total_updates`` is where a falling learning rate ends."""
    return RankSetup(
        partial(rank_engine, config, total_updates),
        config.runtime.device,
        config.trainer.seed,
        plugins=tuple(config.plugins),
        threads=config.runtime.torch_threads,
        meeting_s=config.execution.deadline_s,
    )


def rank_engine(config: Config, total_updates: int, mesh: DeviceMesh | None) -> FsdpEngine:
    """In a rank's process: the model loaded anew, as one of the ranks of ``mesh``."""
    section = config.actor_rollout_ref.model
    return build_train_engine(
        config, load_trainable(section, model_tokenizer(section), config.trainer.seed), total_updates, mesh
    )
