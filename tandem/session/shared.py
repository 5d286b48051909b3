"""The live handles of colocate where the engine generates with the actor's own parameters: nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.roles.rollout.filling import Rollout
from tandem.runtime.local import ENGINE
from tandem.session.parts import Parts
from tandem.session.session import Session


@dataclass(frozen=True)
class SharedSession(Session):
    """A session with one engine, which works in the actor's loop."""

    rollout: Rollout

    def publish(self, version: int) -> None:
        """See ``Session.publish``."""
        self.composite.actor.require_actor("publish weights")
        self.composite.engine.load(None, version)
        self.rollout.acknowledge(version)

    def fill(self, partition: int) -> None:
        """See ``Session.fill``."""
        self.rollout.fill(partition)


def connect_shared(parts: Parts) -> SharedSession:
    """One engine on the actor's own weights, one partition at a time."""
    composite, plane, gate = parts.composite, parts.runtime.plane(parts.ledger(1)), parts.gate(0, [ENGINE])
    rollout = Rollout(
        ENGINE, composite.engine, parts.source, parts.rewards, plane, gate, parts.filling(), composite.tokenizer
    )
    return parts.session(SharedSession, rollout, plane, 0)
