"""The process of a rollout engine: takes orders from its socket, gives groups out as they finish, ends with its owner.

Started as ``python -m tandem.rollout.host FD PARENT``. Errors that are raised on purpose travel to the owner; any other
one ends the process, because nobody knows in what state it left the engine.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from tandem.base.errors import TandemError
from tandem.models.device import found_device, require_on
from tandem.models.numerics import prepare_process
from tandem.models.shared_weights import Place, map_weights
from tandem.rollout.protocol import Cancelling, EngineStats, RolloutEngine
from tandem.rollout.registry import capabilities_of, find_engine, make_engine
from tandem.rollout.request_stream import RequestStream
from tandem.rollout.sound import sound_outputs
from tandem.rollout.spec import EngineSpec
from tandem.rollout.wire import Channel, Line, Message, unpack_sampling
from tandem.transport.circle import Meeting
from tandem.transport.inbox import Inbox

if TYPE_CHECKING:
    from tandem.models.causal_lm import CausalLM

_BEAT_S = 0.5
_MOST_CALLS = 1000


def main(fd: int, parent: int) -> None:
    """Serve until the owner closes the socket or is gone."""
    os.dup2(2, 1)
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=fd))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    setup = channel.receive()
    if setup is None:
        return
    host(EngineSpec.from_json(setup.fields), channel, Host)


def host(spec: EngineSpec, line: Line, serving: type[Host]) -> None:
    """Build the engine and serve it; an error that is raised on purpose travels to the owner."""
    started = threading.Event()

    def beat() -> None:
        while not started.wait(_BEAT_S):
            line.send("beat", steps=None)

    threading.Thread(target=or_die, args=(beat,), daemon=True).start()
    try:
        engine = build_engine(spec)
    except TandemError as error:
        line.send("broken", error=type(error).__name__, text=str(error))
        return
    finally:
        started.set()
    serving(engine, spec, line).serve()


def build_engine(spec: EngineSpec) -> RolloutEngine:
    """Return the engine with weights of its own: on a copy of the model, or on its path where it loads that itself."""
    prepare_process(threads=spec.threads, exact=spec.exact)
    for plugin in spec.plugins:
        importlib.import_module(plugin)
    find_engine(spec.engine)  # raises for one that isn't there
    capabilities = capabilities_of(spec.engine)
    assert capabilities is not None
    if (lacking := capabilities.lacks_package()) is not None:
        raise TandemError(f"rollout engine {spec.engine!r} {lacking} ({sys.executable})")
    device = found_device(spec.device)
    spec = replace(spec, device=str(device))
    if capabilities.wants == "path":
        return make_engine(spec, spec.model, shares_weights=False)
    model = _load(spec).to(device)
    engine = make_engine(spec, model, shares_weights=False)
    require_on(model, device, f"the rollout engine {spec.engine!r}")
    return engine


def _load(spec: EngineSpec) -> CausalLM:
    """Return the engine's model, loaded where that is needed.

    Imported here: the environment of an engine that wants a path need not have what this needs.
    """
    import transformers

    from tandem.models.loading import load_causal_lm

    transformers.utils.logging.disable_progress_bar()
    trusted, tokens = spec.trust_remote_code, spec.tokens
    return load_causal_lm(spec.model, dtype=spec.dtype, trust_remote_code=trusted, adapter=spec.adapter, tokens=tokens)


class Host:
    """Who does what: this thread listens; each ``generate`` has a thread; orders are followed in turn by another.

    The threads of ``generate`` are used again: what the memory allocator keeps for one is of no use to the next.
    """

    def __init__(self, engine: RolloutEngine, spec: EngineSpec, channel: Line) -> None:
        self._engine, self._channel = engine, channel
        self._window = spec.max_num_seqs
        self._calls: dict[int, RequestStream] = {}
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._workers = ThreadPoolExecutor(_MOST_CALLS, "generate")
        self._device = spec.device

    def serve(self) -> None:
        """Listen until the owner is gone or says ``close``."""
        self._channel.send("ready", version=self._engine.version)
        for work in (self._follow_orders, self._beat):
            threading.Thread(target=or_die, args=(work,), daemon=True).start()
        while (message := self._channel.receive()) is not None and message.kind != "close":
            self._hear(message)

    def _hear(self, message: Message) -> None:
        number = message.fields["number"]
        match message.kind:
            case "generate":
                self._generate(number, message)
            case "ping":
                self._channel.send("answer", number=number, version=self._engine.version)
            case "receive":
                inbox = self._inbox  # made by this thread, which also hears of what is given up
                threading.Thread(target=or_die, args=(partial(self._receive, inbox, message),), daemon=True).start()
            case "forget":
                if isinstance(self._engine, Cancelling):
                    self._engine.cancel(message.fields["keys"])
            case "give_up":
                self._inbox.give_up(message.fields["key"])
            case "request" | "end" | "cancel":
                if number in self._calls:  # else it failed before the message came
                    self._calls[number].hear(message)
            case _:
                self._orders.put(message)

    def _generate(self, number: int, message: Message) -> None:
        self._calls = {n: call for n, call in self._calls.items() if not call.over.is_set()}
        sampling = unpack_sampling(message.fields["sampling"])
        call = RequestStream(number, self._channel, max(1, self._window // sampling.samples))
        try:
            outputs = sound_outputs(self._engine, call.requests(), sampling)
        except TandemError as error:
            self._refuse(number, error)
            return
        self._channel.send("answer", number=number)
        self._calls[number] = call
        self._workers.submit(or_die, lambda: call.run(outputs))

    def _follow_orders(self) -> None:
        while True:
            message = self._orders.get()
            number = message.fields["number"]
            try:
                answer = self._follow(message)
            except TandemError as error:
                self._refuse(number, error)
            else:
                self._channel.send("answer", number=number, **answer)

    def _follow(self, message: Message) -> dict[str, Any]:
        engine = self._engine
        match message.kind:
            case "load":
                return self._load(message)
            case "pause":
                engine.pause(message.fields["abort"])
            case "resume":
                engine.resume()
            case "sleep":
                for call in list(self._calls.values()):
                    if call.cancelled:
                        call.over.wait()
                engine.sleep()
            case "wake":
                engine.wake()
        return {}

    def _load(self, message: Message) -> dict[str, Any]:
        fields = message.fields
        weights = self._inbox.take(fields["brought"]) if "brought" in fields else self._weights(message)
        fingerprint = self._engine.load(weights, fields["version"])
        applied_s = self._engine.applied_s if isinstance(self._engine, EngineStats) else None
        return {"version": self._engine.version, "fingerprint": fingerprint, "applied_s": applied_s}

    @cached_property
    def _inbox(self) -> Inbox:
        """Where weights that are broadcast are kept until they are loaded."""
        return Inbox(found_device(self._device))

    def _receive(self, inbox: Inbox, message: Message) -> None:
        """Receive what is broadcast, beside everything else."""
        fields = message.fields
        meeting, number = Meeting.from_json(fields["meeting"]), fields["number"]
        try:
            inbox.receive(meeting, fields["index"], fields["senders"], fields["snapshot"], fields["piece_bytes"])
        except TandemError as error:
            self._refuse(number, error)
        else:
            self._channel.send("answer", number=number)

    def _weights(self, message: Message) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield what came with the order to load."""
        assert message.file is not None
        try:
            return map_weights(message.file, [Place.from_json(fields) for fields in message.fields["places"]])
        finally:
            os.close(message.file)

    def _refuse(self, number: int, error: TandemError) -> None:
        self._channel.send("error", number=number, error=type(error).__name__, text=str(error))

    def _beat(self) -> None:
        while True:
            steps = self._engine.steps if isinstance(self._engine, EngineStats) else None
            self._channel.send("beat", steps=steps)
            time.sleep(_BEAT_S)


def or_die(work: Callable[[], None]) -> None:
    """End the process on an error, which nobody else would see."""
    try:
        work()
    except BrokenPipeError:
        os._exit(0)  # the owner is gone
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _end_with(parent: int) -> None:
    """End this process and what it started once its owner is gone."""
    while os.getppid() == parent:
        time.sleep(_BEAT_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    or_die(lambda: main(int(sys.argv[1]), int(sys.argv[2])))
    sys.stderr.flush()
    os._exit(0)  # threads that still generate need not end first
