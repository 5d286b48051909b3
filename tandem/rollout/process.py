"""A rollout engine in a process of its own: generation goes on while this one trains."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch

from tandem.base.errors import ContractError
from tandem.models.shared_weights import SharedWeights
from tandem.rollout.child import HostProcess
from tandem.rollout.connection import Connection, EngineHost, Patience, as_error
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling
from tandem.rollout.scheduler import IDLE_SOURCE
from tandem.rollout.spec import EngineSpec
from tandem.rollout.wire import Message, pack_request, pack_sampling, unpack_samples
from tandem.transport.circle import Meeting
from tandem.transport.inbox import Brought

NO_WEIGHTS = "this engine has parameters of its own: call load(weights, version)"
_GIVING_UP_S = 30.0  # for a process to answer, once what it receives is given up
_ASK_AGAIN_S = 0.01  # between questions to a source that had nothing


class HostedEngine:
    """A ``RolloutEngine`` but for ``load``, over one that lives in the process ``host``. ``name`` is for messages.

    The constructor returns while the process starts; whoever needs it first waits. Methods may be called by any thread.

    Every method raises ``EngineDiedError`` within seconds once the process has ended, ``EngineHungError`` once it was
    ended for hanging; errors that the engine raises on purpose come through as they are. Requests that are unanswered
    at the same time must have different keys.
    """

    def __init__(self, name: str, host: EngineHost, version: int, patience: Patience) -> None:
        self.name = name
        self._version = version
        self._applied_s = 0.0
        self._link = Connection(name, host, patience)
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The id of the process that generates."""
        return self._link.pid

    @property
    def version(self) -> int:
        return self._version

    @property
    def steps(self) -> int:
        """Decode steps as of the last sign of life."""
        return self._link.steps

    @property
    def applied_s(self) -> float:
        """Seconds that the engine said its last ``load`` took."""
        return self._applied_s

    def silent_s(self) -> float:
        """Return the seconds since the process gave its last sign of life."""
        return self._link.silent_s

    def wait_until_ready(self) -> None:
        """Return once the engine can generate. Raises what its start raised, such as ``DataError`` for no model."""
        self._link.wait_until_ready()

    @property
    def starting(self) -> str:
        """Words that tell since when the process starts, and its last sign of life; empty once it takes orders."""
        return self._link.starting

    @property
    def came_up(self) -> bool:
        """Whether the engine has ever started, also where it has ended since."""
        return self._link.came_up

    def is_ready(self) -> bool:
        """Return whether the engine has started. Raises what its start raised."""
        return self._link.ready

    def check(self) -> None:
        """Raise if the process has ended or was given up; for whoever waits for something else meanwhile."""
        self._link.check("nothing in particular")

    def ping(self, deadline_s: float) -> int:
        """Return the engine's version, asked of its process. Raises ``DeadlineError`` without an answer in time."""
        return int(self._link.ask("ping", "an answer to a health call", deadline_s).fields["version"])

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        """Generate in the other process; as many requests are sent ahead as an engine in this one would take."""
        self._link.wait_until_ready()
        number = self._link.open()
        self._link.send("generate", number=number, sampling=pack_sampling(sampling))
        try:
            self._link.answer(number, "the start of a generation")
        except BaseException:
            self._link.drop(number)
            raise
        return self._generate(number, _Feed(self._link, number, requests))

    def _generate(self, number: int, feed: _Feed) -> Iterator[GroupOutput]:
        since = time.monotonic()
        under_way = True
        try:
            while under_way:
                more = feed.supply()
                awaited = f"{len(feed.unanswered)} groups, {next(iter(feed.unanswered), 'none')!r} the first of them,"
                for message in self._link.collect(number, awaited, since, _ASK_AGAIN_S if more else None):
                    match message.kind:
                        case "want":
                            feed.wanted += message.fields["count"]
                        case "drawn":
                            feed.notify(message)
                        case "group":
                            yield feed.answered(message)
                        case _:
                            under_way = False
                            if message.kind == "failed":
                                raise as_error(message)
                    since = time.monotonic()
        finally:
            if under_way:
                self._link.send("cancel", number=number)
            self._link.drop(number)

    def pause(self, abort: bool = False) -> None:
        self._link.set_paused(True)
        self._link.ask("pause", "a pause", abort=abort)

    def resume(self) -> None:
        self._link.ask("resume", "the end of a pause")
        self._link.set_paused(False)

    def cancel(self, keys: Iterable[int | str]) -> None:
        """Send word of groups that nobody wants any more."""
        self._link.send("forget", number=-1, keys=list(keys))

    def sleep(self) -> None:
        self._link.ask("sleep", "sleep")

    def wake(self) -> None:
        self._link.ask("wake", "wake")

    def receive(self, meeting: Meeting, index: int, senders: int, number: int, piece_bytes: int) -> None:
        """Have the process keep a snapshot that is broadcast beside the weights that it has; see ``Inbox.receive``."""
        asked = {"index": index, "senders": senders, "snapshot": number, "piece_bytes": piece_bytes}
        patience = meeting.seconds + _GIVING_UP_S
        self._link.ask("receive", "a broadcast of weights", patience, meeting=meeting.to_json(), **asked)

    def give_up(self, key: str) -> None:
        """Have the process end what it receives in the groups of ``key``."""
        self._link.send("give_up", number=-1, key=key)

    def close(self) -> None:
        """End the process. Safe to call twice; everything else raises from then on."""
        atexit.unregister(self.close)
        self._link.close()

    def _load(self, version: int, file: int | None = None, **fields: Any) -> str | None:
        """Have weights loaded that lie where ``file`` and ``fields`` say; their fingerprint."""
        answer = self._link.ask("load", f"weights version {version} to be loaded", file=file, version=version, **fields)
        self._version = answer.fields["version"]
        if answer.fields["applied_s"] is not None:
            self._applied_s = answer.fields["applied_s"]
        fingerprint: str | None = answer.fields["fingerprint"]
        return fingerprint


class ProcessEngine(HostedEngine):
    """A ``RolloutEngine`` over the one that ``spec`` describes, hosted by a child process.

    The process has ``start_s`` seconds to start. ``deadline_s`` bounds every other wait: for an answer, and for a token
    while requests are unanswered. A process from which nothing comes for ``silence_s`` seconds, not even its regular
    sign of life, has hung. ``bucket_bytes``: see ``SharedWeights``.
    """

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        *,
        start_s: float = 300.0,
        deadline_s: float = 600.0,
        silence_s: float = 30.0,
        bucket_bytes: int = 2**26,
    ) -> None:
        self._staged = SharedWeights(bucket_bytes)
        self._loading = threading.Lock()  # held while what is staged is read
        super().__init__(name, HostProcess(spec), spec.version, Patience(start_s, deadline_s, silence_s))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        """Hand over weights in shared memory as they are; others are copied into some first.

        A source that fails leaves the engine as it was.
        """
        if weights is None:
            raise ContractError(NO_WEIGHTS)
        if isinstance(weights, Brought):
            return self._load(version, brought=weights.number)
        with self._loading:
            shared = weights
            if not isinstance(shared, SharedWeights):
                self._staged.write(shared)
                shared = self._staged
            return self._load(version, shared.fd, places=[place.to_json() for place in shared.places])


class _Feed:
    """What one generation still wants and what it owes. ``wanted``: requests that the engine has room for."""

    def __init__(self, link: Connection, number: int, requests: Iterable[GroupRequest | None]) -> None:
        self.wanted = 0
        self.unanswered: dict[int | str, GroupRequest] = {}
        self._link, self._number = link, number
        self._source = iter(requests)
        self._ended = False

    def supply(self) -> bool:
        """Send what is wanted and there; whether the source should be asked again soon."""
        while self.wanted and not self._ended:
            try:
                request = next(self._source)
            except StopIteration:
                self._ended = True
                self._link.send("end", number=self._number)
                break
            if request is None:
                if not self.unanswered:
                    raise ContractError(IDLE_SOURCE)
                return True
            self._send(request)
        return False

    def notify(self, message: Message) -> None:
        """Tell whoever watches a request what was drawn for it."""
        fields = message.fields
        request = self.unanswered.get(fields["key"])
        if request is not None and request.watch is not None:
            request.watch(fields["sample"], fields["ids"], fields["logprobs"])

    def answered(self, message: Message) -> GroupOutput:
        """Return the group that ``message`` brings, with the request that it answers."""
        request = self.unanswered.pop(message.fields["key"])
        samples = unpack_samples(message.fields["samples"], message.tensors)
        return GroupOutput(request, samples, message.tensors.get("prompt_routes"))

    def _send(self, request: GroupRequest) -> None:
        if request.key in self.unanswered:
            raise ContractError(f"two requests that are unanswered have the key {request.key!r}: give each its own")
        self.unanswered[request.key] = request
        self.wanted -= 1
        fields, tensors = pack_request(request)
        self._link.send("request", tensors, number=self._number, **fields)
