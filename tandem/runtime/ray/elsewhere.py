"""An engine of another environment on Ray: the actor starts its process and passes on what is said, either way."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Protocol

from tandem.base.errors import EngineDiedError
from tandem.models.shared_weights import SharedWeights
from tandem.rollout.child import HostProcess
from tandem.rollout.host import or_die
from tandem.rollout.spec import EngineSpec
from tandem.rollout.wire import Line, Message
from tandem.runtime.ray.weights import RemoteWeights

_LAST_WORDS_S = 5.0  # for what was said last to be collected


class Collected(Line, Protocol):
    """A line whose messages are fetched by the other end, as those of ``HostedLine``."""

    @property
    def heard(self) -> bool:
        """All that was sent has been collected."""


def relay(spec: EngineSpec, line: Collected) -> None:
    """Serve the engine from a process of ``spec.python``; ends with it, by an error that says how it ended.

    Weights come as references into Ray's shared memory, and go on in memory that the process maps: one copy.
    """
    child = HostProcess(spec)
    threading.Thread(target=or_die, args=(partial(_pass_on, line, child.channel),), daemon=True).start()
    while (message := child.channel.receive()) is not None:
        line.send(message.kind, message.tensors, **message.fields)
    patience = time.monotonic() + _LAST_WORDS_S
    while not line.heard and time.monotonic() < patience:
        time.sleep(0.05)
    raise EngineDiedError(f"the process of the engine ({spec.python}) {child.ending()}")


def _pass_on(line: Line, process: Line) -> None:
    """Pass the owner's messages on to the process."""
    shared = SharedWeights()
    while (message := line.receive()) is not None:
        if message.kind == "load" and "refs" in message.fields:
            _load(message, shared, process)
        else:
            process.send(message.kind, message.tensors, **message.fields)
    process.close()


def _load(message: Message, shared: SharedWeights, process: Line) -> None:
    """Load, and answer once it is done: only then does the next load come, so the memory is free again."""
    fields = dict(message.fields)
    weights = RemoteWeights(fields.pop("refs"))
    weights.fetch()
    shared.write(weights)
    process.send("load", file=shared.fd, **fields, places=[place.to_json() for place in shared.places])
