"""From the config to roles on Ray: what their actors are given, and the runtime that starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.schema import Config
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.ray.store import RayStore
from tandem.models.fingerprint import fingerprint, joined
from tandem.models.loading import describe_causal_lm
from tandem.models.token_ids import TokenIds
from tandem.models.tokenizer import check_vocabulary
from tandem.plan.parts.engine import after_swap
from tandem.plan.patches import patch_tokens
from tandem.plan.plan import Plan, Pushed
from tandem.remote.calls import import_ray
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.critic import CRITIC, Critic
from tandem.roles.rollout.engine_pool import EnginePool
from tandem.roles.train_group import TrainGroup
from tandem.rollout.protocol import RolloutEngine
from tandem.runtime.build.composite import (
    actor_of,
    assemble_composite,
    build_train_engine,
    load_trainable,
    model_tokenizer,
)
from tandem.runtime.build.critic import CriticTraining, critic_of, critic_training, critic_value_model, value_engine
from tandem.runtime.build.engine_specs import build_forward_engine, engine_spec, replica
from tandem.runtime.build.snapshots import broadcast_snapshots
from tandem.runtime.build.teachers import check_tokenizers
from tandem.runtime.ray.processes import RayRuntime, RemoteSnapshots
from tandem.runtime.ray.ranks import BuildEngine, RankSetup, RayTrainRank
from tandem.runtime.ray.weights import RemoteWeights
from tandem.stages.facts import TEACHER
from tandem.train.packed_engine import PackedEngine
from tandem.train.protocol import Wanted
from tandem.transport.circle import Meeting
from tandem.transport.inbox import Brought
from tandem.weights.broadcast import BroadcastWeights, Member
from tandem.weights.sync import Snapshot, Weights
from tandem.weights.transfer import Transfer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACTOR, ROLLOUT, ADVANTAGES = "actor", "rollout", "advantages"


class RayRoles:
    """A ``Runtime`` on Ray: ranks, engines and the data plane are actors; this process drives and holds no weights."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config, self._plan = config, plan
        deployed = [placed for placed in plan.placements if placed.role != ADVANTAGES]
        self._cluster = RayRuntime.start(deployed, device=config.runtime.device)
        try:
            started = self._cluster.engines(
                ROLLOUT,
                engine_spec(config, plan.pushed, device=config.runtime.device),
                start_s=config.actor_rollout_ref.rollout.start_s,
                deadline_s=config.execution.deadline_s,
                bucket_bytes=config.execution.weight_sync.bucket_mb << 20,
            )
        except BaseException:
            self.close()
            raise
        self.pool = EnginePool({engine.name: engine for engine in started})

    def composite(self, tokenizer: PreTrainedTokenizerBase, steps: int) -> ActorRolloutRef:
        """Start actor and critic as groups of ranks on the cluster, with the engines that are there."""
        config, section = self._config, self._config.actor_rollout_ref.model
        tokens = TokenIds.of(tokenizer)
        model = describe_causal_lm(section.path, trust_remote_code=section.trust_remote_code, tokens=tokens)
        check_vocabulary(tokenizer, int(model.model.get_input_embeddings().weight.shape[0]))  # type: ignore[index]
        check_tokenizers(config, self._plan, tokenizer)
        updates = self._plan.batch.optimizer_steps_of(steps)
        actor = actor_of(config, self._plan, self._group(ACTOR, partial(rank_engine, config, updates)))
        critic = self._critic(tokenizer, steps) if self._plan.critic is not None else None
        return assemble_composite(config, self._plan, tokenizer, model, actor, self.pool, critic, self.scorer)

    def restart(self, name: str) -> RolloutEngine:
        """Start the engine ``name`` again."""
        return self._cluster.restart(name)

    def swap(self) -> None:
        """Start the other engine from here on."""
        self._config = after_swap(self._config)
        spec = engine_spec(self._config, self._plan.pushed, device=self._config.runtime.device)
        self._cluster.change_engines(spec)

    def plane(self, ledger: Ledger) -> RayStore:
        """Start a store of a controller and storage units on the cluster, over ``ledger``."""
        execution = self._config.execution
        return self._cluster.store(ledger, execution.deadline_s, execution.data_plane.num_data_storage_units)

    def snapshots(self, composite: ActorRolloutRef) -> Callable[[], Snapshot]:
        """Return what puts the ranks' weights into Ray's object store, while training goes on."""
        bucket_bytes = self._config.execution.weight_sync.bucket_mb << 20
        ranks = cast("TrainGroup[RayTrainRank]", composite.actor.ranks)  # ``composite`` made them
        part = self._plan.pushed
        assert part != "nothing"  # engines on Ray have weights of their own
        if self._plan.transport == "collective":
            return broadcast_snapshots(self._config, part, ranks, str(import_ray().util.get_node_ip_address()))
        return RemoteSnapshots(ranks, bucket_bytes, part=part)

    def scorer(self, role: str, *, moves: bool, path: str | None = None) -> GroupScorer:
        """Start a group of ranks of its own for ``role``, with weights that move or from ``path``."""
        several = len(self._plan.teachers) if role == TEACHER else 1
        bucket_bytes = self._config.execution.weight_sync.bucket_mb << 20
        called = f"{role} {path}" if several > 1 else role
        build = partial(forward_engine, self._config, self._plan.pushed, moves, path)
        group = self._group(role, build, several, called)
        beside = partial(group.call, RayTrainRank.base_fingerprint) if self._plan.pushed == "adapter" else None
        return GroupScorer(group, bucket_bytes, beside)

    def close(self) -> None:
        """End every actor and give the devices back."""
        self._cluster.close()

    def _group(
        self, role: str, build: BuildEngine, several: int = 1, called: str | None = None
    ) -> TrainGroup[RayTrainRank]:
        """Start a rank on each device of the role, which ``several`` such groups share; see ``RayRuntime.ranks``."""
        config, execution, name = self._config, self._config.execution, role if called is None else called
        setup = rank_setup(config, build)
        if role == ACTOR:
            actor = config.actor_rollout_ref.actor
            tensor, sequence = actor.tensor_model_parallel_size, actor.ulysses_sequence_parallel_size
            setup = replace(setup, tensor_parallel=tensor, sequence_parallel=sequence)
        return TrainGroup(
            self._cluster.ranks(role, setup, several=several, called=name),
            deadline_s=execution.deadline_s,
            warning_s=execution.stall_warning_s,
            role=name,
            balance=self._plan.flow.balance,
            whole_groups=config.trainer.exact,
            same_rows=setup.tensor_parallel * setup.sequence_parallel,
            patch_tokens=patch_tokens(config),
        )

    def _critic(self, tokenizer: PreTrainedTokenizerBase, steps: int) -> Critic:
        config = self._config
        model = critic_value_model(config, tokenizer).to("meta")  # its ranks have the weights
        training = critic_training(self._plan, steps)
        ranks = self._group(CRITIC, partial(critic_engine, config, training))
        return critic_of(config, self._plan, model, ranks)


class GroupScorer:
    """A ``Scorer`` over ranks; weights stay in Ray's shared memory, in buckets of ``bucket_bytes``.

    What is in place stays there too, so that nobody need ask the ranks for it while they score. ``beside`` gives the
    fingerprint of the base weights where those that are placed are adapters; it is asked once.
    """

    def __init__(self, ranks: TrainGroup[RayTrainRank], bucket_bytes: int, beside: Callable[[], str] | None) -> None:
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        self._beside = None if beside is None else cache(beside)
        self._held: Weights = ()
        self._members = tuple(ScoringRank(ranks, index) for index in range(len(ranks)))

    def keep(self, weights: Weights) -> Weights:
        """Return the weights themselves: holding the references keeps what they refer to."""
        return weights

    def fingerprint(self, weights: Weights) -> str:
        """Return the fingerprint of ``weights``; of adapters joined with that of their base."""
        own = weights.fingerprint if isinstance(weights, RemoteWeights | BroadcastWeights) else fingerprint(weights)
        return own if self._beside is None else joined(own, self._beside())

    def members(self) -> Sequence[Member]:
        """Return the ranks, as a broadcast reaches them."""
        return self._members

    def place(self, weights: Weights) -> None:
        """Have every rank take the weights, by reference, or those that it has beside its own."""
        if isinstance(weights, Brought):
            self._ranks.call(RayTrainRank.take_received, weights.number)
            self._held = _Placed(self._ranks, "adapter" if self._beside is not None else "merged")
            return
        remote = weights if isinstance(weights, RemoteWeights) else RemoteWeights.put(weights, self._bucket_bytes)
        self._ranks.call(RayTrainRank.take_weights, list(remote.refs))
        self._held = remote

    def held(self) -> Weights:
        """Return the weights that the ranks took last."""
        return self._held

    def silent(self) -> list[str]:
        """Name the ranks that give no sign of life."""
        return self._ranks.silent()

    def forward(self, batch: DataProto, want: Sequence[Wanted]) -> dict[str, Ragged]:
        """Compute per-token results by name, each rank on its share of the batch."""
        return self._ranks.forward(batch, want)


class ScoringRank:
    """One rank of a role that scores, as a ``Member`` of a broadcast."""

    def __init__(self, ranks: TrainGroup[RayTrainRank], index: int) -> None:
        self._ranks, self._index = ranks, index
        self.name = ranks.name_of(index)

    def receive(self, meeting: Meeting, index: int, senders: int, number: int, piece_bytes: int) -> None:
        """Have the rank keep the snapshot beside what it scores with."""
        self._ranks.aside(self._index, RayTrainRank.receive, meeting, index, senders, number, piece_bytes)

    def give_up(self, key: str) -> None:
        """Have the rank end what it receives in the groups of ``key``."""
        Transfer(self.name, lambda: self._ranks.aside(self._index, RayTrainRank.give_up, key))


class _Placed:
    """The weights that ``ranks`` have, gathered as they are iterated."""

    def __init__(self, ranks: TrainGroup[RayTrainRank], part: Literal["adapter", "merged"]) -> None:
        self._ranks, self._part = ranks, part

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._ranks.export(self._part)


def rank_setup(config: Config, build: BuildEngine) -> RankSetup:
    """Collect what the ranks of a role are given; ``build`` is one of the functions below."""
    return RankSetup(
        build,
        config.runtime.device,
        config.trainer.seed,
        plugins=tuple(config.plugins),
        threads=config.runtime.torch_threads,
        exact=config.trainer.exact,
        tag_device=config.actor_rollout_ref.actor.tag_device,
        meeting_s=config.execution.deadline_s,
        folder=os.getcwd(),
    )


def rank_engine(config: Config, total_updates: int, device: torch.device, mesh: DeviceMesh | None) -> PackedEngine:
    """Build the engine of a rank of the actor: the model loaded anew, as one of the ranks of ``mesh``.

    ``total_updates`` is where a falling learning rate ends.
    """
    section = config.actor_rollout_ref.model
    model = load_trainable(section, model_tokenizer(section, config.data), config.trainer.seed)
    return build_train_engine(config, model, total_updates, device, mesh)


def critic_engine(
    config: Config, training: CriticTraining, device: torch.device, mesh: DeviceMesh | None
) -> PackedEngine:
    """Build the engine of a rank of the critic, which loads its model anew."""
    model = critic_value_model(config, model_tokenizer(config.actor_rollout_ref.model, config.data))
    return value_engine(config, training, model, device, mesh)


def forward_engine(
    config: Config, pushed: Pushed, moves: bool, path: str | None, device: torch.device, mesh: DeviceMesh | None
) -> PackedEngine:
    """Build the engine of a rank of a role that only scores; see ``replica``."""
    return build_forward_engine(config, replica(config, pushed, moves=moves, path=path), device, mesh)
