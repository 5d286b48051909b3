"""Rollout engines in Ray actors, behind the same handle as one in a child process: only line and weights differ."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from tandem.base.errors import ContractError, EngineDiedError, TandemError
from tandem.remote.calls import Remote, Reply, end_with_node, import_ray, name_in_cluster, work_beside
from tandem.remote.payload import Packed, pack, unpack
from tandem.rollout.connection import Patience
from tandem.rollout.host import Host, host, or_die
from tandem.rollout.process import NO_WEIGHTS, HostedEngine
from tandem.rollout.spec import EngineSpec
from tandem.rollout.wire import Message
from tandem.runtime.ray.cluster import Slot
from tandem.runtime.ray.elsewhere import relay
from tandem.runtime.ray.weights import RemoteWeights
from tandem.transport.inbox import Brought

_COLLECT_S = 1.0
_LOOK_S = 5.0
"""So often it is asked whether anybody still listens."""
_COLLECTING = "collecting"
_Sent: TypeAlias = tuple[str, Mapping[str, Any], Packed]


class RayEngine(HostedEngine):
    """A ``RolloutEngine`` over the one that ``spec`` describes, hosted by an actor on ``slot``.

    See ``HostedEngine`` and ``ProcessEngine``. ``part``: share of the device, where others take turns on it.
    """

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        slot: Slot,
        *,
        part: float = 1.0,
        start_s: float = 300.0,
        deadline_s: float = 600.0,
        silence_s: float = 30.0,
        bucket_bytes: int = 2**26,
    ) -> None:
        self._bucket_bytes = bucket_bytes
        host = ActorHost(name, replace(spec, device=slot.device(spec.device)), slot.options(part))
        super().__init__(name, host, spec.version, Patience(start_s, deadline_s, silence_s))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        """Hand over what lies in Ray's shared memory; the rest is copied there first.

        A source that fails leaves the engine as it was.
        """
        if weights is None:
            raise ContractError(NO_WEIGHTS)
        if isinstance(weights, Brought):
            return self._load(version, brought=weights.number)
        remote = weights if isinstance(weights, RemoteWeights) else RemoteWeights.put(weights, self._bucket_bytes)
        return self._load(version, refs=remote.refs)


class ActorHost:
    """The actor of an engine as its owner sees it. See ``EngineHost``."""

    def __init__(self, name: str, spec: EngineSpec, options: Mapping[str, Any]) -> None:
        called = f"rollout engine {name!r}"
        hosted = import_ray().remote(concurrency_groups={_COLLECTING: 1})(EngineActor)
        actor = hosted.options(name=name_in_cluster(called), **options)
        self._remote = Remote(actor.remote(), called, EngineDiedError)
        self._started = self._remote.submit("start", spec, os.getcwd(), awaited="its start")
        self.channel = OwnerLine(self._remote)

    @property
    def pid(self) -> int:
        """The id of the actor's process; 0 for one that has not started, or died before."""
        try:
            return int(self._started.result(_COLLECT_S))
        except (TandemError, TimeoutError):
            return 0

    def ending(self) -> str:
        """End the actor; returns what Ray says of its death, if it died by itself."""
        self.kill()
        return f"has ended: {self.channel.death}" if self.channel.death else "was ended"

    def kill(self) -> None:
        """End the actor's process now."""
        self._remote.kill()


class OwnerLine:
    """A ``Line`` to an actor: orders are calls of it, and one call at a time waits for what it has to say.

    However long that takes: how long a start or a silence may last is the ``Connection``'s to say, and what the actor
    has to say later would be lost with the call.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._asked: Reply | None = None
        self._arrived: deque[Message] = deque()
        self._closed = threading.Event()
        self.death = ""

    def send(
        self, kind: str, tensors: Mapping[str, torch.Tensor] | None = None, file: int | None = None, **fields: Any
    ) -> None:
        """Deliver a message to the engine's actor; files can't travel."""
        assert file is None
        self._remote.submit("deliver", kind, fields, pack(dict(tensors or {})))

    def receive(self) -> Message | None:
        """Return the next message of the engine; None once the line is closed or the actor dead."""
        while not self._arrived:
            if self._closed.is_set():
                return None
            asked = self._asked or self._remote.submit("collect", _COLLECT_S, awaited="its word", group=_COLLECTING)
            self._asked = asked
            try:
                sent = asked.result(_LOOK_S)
            except TimeoutError:
                continue
            except TandemError as error:
                self.death = str(error)
                return None
            self._asked = None
            self._arrived += [Message(kind, fields, unpack(packed)) for kind, fields, packed in sent]
        return self._arrived.popleft()

    def close(self) -> None:
        """End the waiting for messages."""
        self._closed.set()


class EngineActor:
    """The process of an engine. ``collect`` runs beside the other methods, which keep their order."""

    def __init__(self) -> None:
        end_with_node()
        self._line = HostedLine()

    def start(self, spec: EngineSpec, folder: str) -> int:
        """Build the engine and serve it, in a thread, here or in a process of another environment; the pid of this one.

        The driver works in ``folder``.
        """
        work_beside(folder)
        here = spec.python is None
        serve = partial(host, spec, self._line, ActorServing) if here else partial(relay, spec, self._line)
        threading.Thread(target=or_die, args=(serve,), daemon=True).start()
        return os.getpid()

    def deliver(self, kind: str, fields: Mapping[str, Any], packed: Packed) -> None:
        """Take a message of the owner's."""
        self._line.arrived.put(Message(kind, fields, unpack(packed.copied())))

    def collect(self, seconds: float) -> list[_Sent]:
        """Return what the engine has to say; waits for something, at most ``seconds``."""
        return self._line.take(seconds)


class HostedLine:
    """The actor's end of the line."""

    def __init__(self) -> None:
        self.arrived: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[_Sent] = queue.SimpleQueue()

    @property
    def heard(self) -> bool:
        """Whether all that was sent has been collected."""
        return self._sent.empty()

    def send(
        self, kind: str, tensors: Mapping[str, torch.Tensor] | None = None, file: int | None = None, **fields: Any
    ) -> None:
        """Leave a message for the owner to collect; files can't travel."""
        assert file is None
        self._sent.put((kind, fields, pack(dict(tensors or {}))))

    def receive(self) -> Message | None:
        """Return the next message. The actor ends with its owner, so there is always somebody at the other end."""
        return self.arrived.get()

    def close(self) -> None:
        """Wake the receiver with None."""
        self.arrived.put(None)

    def take(self, seconds: float) -> list[_Sent]:
        """Take all messages that were sent; waits for the first at most ``seconds``."""
        try:
            taken = [self._sent.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._sent.empty():
            taken.append(self._sent.get())
        return taken


class ActorServing(Host):
    """Weights come as references into Ray's shared memory."""

    def _weights(self, message: Message) -> Iterable[tuple[str, torch.Tensor]]:
        weights = RemoteWeights(message.fields["refs"])
        weights.fetch()  # so that the engine doesn't stand still while they travel
        return weights
