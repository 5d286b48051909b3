"""What lives with one rank of the actor: its part of the model and optimizer, and the weight tags beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.base.errors import ContractError, DataError
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.models.loading import ComputeType, load_causal_lm, load_model
from tandem.stages.facts import OLD_ACTOR
from tandem.train import checkpoint
from tandem.train.checkpoint import Checkpoint
from tandem.train.objective import LossSum, Objective
from tandem.train.packed_engine import PackedEngine
from tandem.train.protocol import Exported, StepResult, Wanted
from tandem.train.sharding import local_shard
from tandem.transport.circle import Meeting
from tandem.transport.outbox import Outbox
from tandem.weights.store import ACTOR, WeightStore

TagDevice = Literal["cpu", "device"]

Bucket = list[tuple[str, torch.Tensor]]
"""Some (Hugging Face name, full tensor) of an export."""


@dataclass(frozen=True)
class RankStatus:
    """Where a rank is: its process, the steps of its optimizer, its saved weight tags and the one in place."""

    rank: int
    pid: int
    updates: int
    skipped: int
    tags: tuple[str, ...]
    in_place: str


class TrainRank:
    """One rank of the actor. With several ranks each method is a meeting: all are called, in the same order.

    A ``TrainGroup`` calls its methods by reference (``ranks.call(TrainRank.sleep)``), so each is written here alone.

    Batches are this rank's share; losses and steps come back for all ranks together. Arguments and results can be
    sent to other processes (of an export only where the transport copies tensors to the CPU). ``tag_device`` is where
    copies of the weights are kept: in the host's memory, or on the device of the weights.
    """

    def __init__(self, engine: PackedEngine, rank: int = 0, tag_device: TagDevice = "device") -> None:
        self.engine = engine
        self.weights = WeightStore(engine.shards(), torch.device("cpu") if tag_device == "cpu" else None)
        self._rank = rank
        self._exported: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._loaded: set[str] = set()
        self._beside: dict[str, PackedEngine] = {}
        self._outbox: Outbox | None = None

    # --- the model ---------------------------------------------------------------------------------------------------

    def forward(self, batch: DataProto, want: Sequence[Wanted], tag: str = ACTOR) -> dict[str, Ragged]:
        """Run ``TrainEngine.forward`` under the weights ``tag``; the actor's are back afterwards.

        ``tag`` may also be a model of its own that ``load_beside`` brought.
        """
        if tag in self._beside:
            return self._beside[tag].forward(batch, want)
        with self.weights.using(tag):
            return self.engine.forward(batch, want)

    def forward_backward(self, batch: DataProto, objective: Objective) -> LossSum:
        """Add the gradient of the objective's sum; refused unless the actor's own weights are in place."""
        self.weights.require_actor("train")
        return self.engine.forward_backward(batch, objective)

    def optim_step(self, denominator: float) -> StepResult:
        """Take the optimizer step; refused unless the actor's own weights are in place."""
        self.weights.require_actor("train")
        return self.engine.optim_step(denominator)

    # --- weights -----------------------------------------------------------------------------------------------------

    def save_tag(self, tag: str) -> None:
        """Copy the weights in place into ``tag``."""
        self.weights.save(tag)

    def tag_base(self, tag: str) -> None:
        """Let ``tag`` be the base model, the adapters switched off: no copy is made."""
        if not self.engine.has_adapters:
            raise ContractError(f"{tag!r} can't be the base: the model has no adapters; save a copy of its weights")
        self.weights.define(tag, self.engine.without_adapters)

    def load_tag(self, tag: str, path: str, trust_remote_code: bool = False) -> None:
        """Fill ``tag`` from a model of the actor's architecture: a folder that every rank sees, or a hub id.

        Checkpoints leave it out: it is where it came from.
        """
        try:
            whole = dict(load_model(path, trust_remote_code=trust_remote_code).named_parameters())
            self.weights.put(tag, self.engine.shards_of(whole))
        except ContractError as error:
            raise DataError(f"the model {path!r} can't take the actor's place as {tag!r}: {error}") from error
        self._loaded.add(tag)

    def load_beside(
        self, name: str, path: str, dtype: ComputeType = "float32", trust_remote_code: bool = False
    ) -> None:
        """Bring another model, of any architecture, onto the ranks; ``forward`` finds it as the tag ``name``.

        It scores the tokens of the actor's: a teacher has its tokenizer.
        """
        tokens = self.engine.model.tokens
        model = load_causal_lm(path, dtype=dtype, trust_remote_code=trust_remote_code, tokens=tokens)
        self._beside[name] = self.engine.beside(model)

    def require_actor(self, purpose: str) -> None:
        """Refuse ``purpose`` unless the actor's own weights are in place."""
        self.weights.require_actor(purpose)

    def open_export(self, part: Exported = "merged") -> None:
        """Start an export; one that was not finished is forgotten."""
        self.require_actor("export weights")
        self._exported = self.engine.export(part)

    def next_bucket(self, max_bytes: int) -> Bucket:
        """Return more of the opened export, tensor by tensor until they hold ``max_bytes`` or more; empty at the end.

        Tensors may share memory with the model. Ranks after the first only take part in the gathering and give [].
        """
        self.require_actor("export weights")
        bucket: Bucket = []
        total = 0
        while total < max_bytes and (pair := next(self._exported, None)) is not None:
            total += pair[1].nbytes
            if self._rank == 0:
                bucket.append(pair)
        return bucket

    # --- weights that are broadcast, each rank a part of them ---------------------------------------------------------

    def open_outbox(self, number: int, senders: int, part: Exported = "merged") -> None:
        """Begin the snapshot ``number`` of ``part``, of which the first ``senders`` ranks keep a part each."""
        self.open_export(part)
        if self._rank < senders and self._outbox is None:
            self._outbox = Outbox(self._rank, senders, self.engine.device)
        if self._outbox is not None:
            self._outbox.open(number)

    def fill_outbox(self, bucket_bytes: int) -> None:
        """Gather the snapshot that was begun, one tensor after the other; it is sent meanwhile."""
        self.require_actor("export weights")
        failed = True
        try:
            if self._outbox is None:
                for _ in self._exported:  # it takes part in gathering alone
                    pass
            else:
                self._outbox.fill(self._exported, bucket_bytes)
            failed = False
        finally:
            if self._outbox is not None:
                self._outbox.end(failed=failed)

    def close_outbox(self) -> None:
        """Give up what is not gathered yet; whoever waits for it hears so."""
        if self._outbox is not None:
            self._outbox.fail()

    def device_type(self) -> str:
        """Return the kind of device that this rank computes on."""
        return self.engine.device.type

    def send_outbox(self, meeting: Meeting, number: int, piece_bytes: int) -> None:
        """Send this rank's part to all members of the meeting, beside other calls."""
        assert self._outbox is not None  # who is asked is a sender
        self._outbox.send(meeting, number, piece_bytes)

    def give_up_outbox(self, key: str) -> None:
        """End what is sent in the group ``key``, beside other calls."""
        if self._outbox is not None:
            self._outbox.give_up(key)

    def outbox_part(self, number: int, seconds: float) -> tuple[str, int]:
        """Return fingerprint and bytes of this rank's part once it is complete, beside other calls."""
        assert self._outbox is not None
        return self._outbox.fingerprint(number, seconds)

    def outbox_pairs(self, number: int, seconds: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part, in its own process."""
        assert self._outbox is not None
        return (pair for bucket in self._outbox.buckets(number, seconds) for pair in bucket.pairs())

    def base_fingerprint(self) -> str:
        """Return the fingerprint of the weights beside the adapters, which never change."""
        return self.engine.base_fingerprint()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, root: Path, step: int, facts: Mapping[str, Any], keep: int, parts: Mapping[str, Path] | None = None
    ) -> Checkpoint:
        """Call ``checkpoint.save`` of model, optimizer and tags; ``root`` is a folder that every rank sees."""
        self.require_actor("save a checkpoint")
        return checkpoint.save(root, step, tensors=self._state(), facts=facts, keep=keep, parts=parts or {})

    def load_checkpoint(self, path: Path) -> None:
        """Continue from the checkpoint in the folder ``path``, written by any number of ranks."""
        self.require_actor("load a checkpoint")
        state = self._state()
        found = checkpoint.Checkpoint(path, 0)
        found.load_tensors(state)  # checked once, by who found it
        self.engine.load_state_dict(state["actor"])
        tags = state["tags"]
        self.weights.load_state_dict({t: {n: local_shard(x) for n, x in tags[t].items()} for t in tags})
        found.restore_random_state()

    def _state(self) -> dict[str, Any]:
        """Return the sharded tensors and numbers; ``old_actor`` is not among them, for it ends with its step."""
        saved, kept_out = self.weights.state_dict(), {OLD_ACTOR, *self._loaded}
        tags = {tag: self.engine.as_sharded(copies) for tag, copies in saved.items() if tag not in kept_out}
        return {"actor": self.engine.state_dict(), "tags": tags}

    # --- turns and health --------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give up the memory that only training needs."""
        self.engine.sleep()

    def wake(self) -> None:
        """Take back the memory that ``sleep`` gave up."""
        self.engine.wake()

    def status(self) -> RankStatus:
        """Answer, which shows that the rank lives. No other rank takes part."""
        tags, in_place = tuple(self.weights.tags), self.weights.in_place
        return RankStatus(self._rank, os.getpid(), self.engine.updates, self.engine.skipped, tags, in_place)
