"""Messages between a process and the engine that it hosts: JSON, tensors as raw bytes, an open file. Never a pickle."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from safetensors.torch import load, save

from tandem.columns.images import Images
from tandem.rollout.protocol import GroupRequest, SampleOutput, Sampling, Watch

_HEAD = struct.Struct("!IQ")  # bytes of JSON, bytes of tensors
_FILE = struct.Struct("i")


@dataclass(frozen=True, eq=False)
class Message:
    """``kind`` says what it is. ``file``: an open file that came along, which the receiver closes."""

    kind: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    file: int | None = None


class Line(Protocol):
    """One end of a line between an engine and its owner; any thread may send, one receives. ``Channel`` is one over a
    socket, ``OwnerLine`` and ``HostedLine`` are the two ends of one through Ray.
    """

    def send(
        self, kind: str, tensors: Mapping[str, torch.Tensor] | None = None, file: int | None = None, **fields: Any
    ) -> None:
        """Send one message. Raises ``OSError`` where the other end is known to be gone."""

    def receive(self) -> Message | None:
        """Wait for the next message; None once the other end is gone."""

    def close(self) -> None:
        """End the line, either way; whoever waits in ``receive`` gets None."""


class Channel:
    """A ``Line`` over a stream socket. A send takes at most ``send_s`` seconds."""

    def __init__(self, end: socket.socket, send_s: int | None = None) -> None:
        self._end = end
        if send_s is not None:  # not a timeout of Python's, which would hold for receiving too
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_s, 0))
        self._sending = threading.Lock()

    def send(
        self, kind: str, tensors: Mapping[str, torch.Tensor] | None = None, file: int | None = None, **fields: Any
    ) -> None:
        """Send one message. Raises ``OSError`` where the other end is gone or takes nothing."""
        text = json.dumps([kind, fields]).encode()
        data = save(dict(tensors)) if tensors else b""
        head = _HEAD.pack(len(text), len(data))
        with self._sending:
            if file is not None:
                socket.send_fds(self._end, [head], [file])
                self._end.sendall(text + data)
            else:
                self._end.sendall(head + text + data)

    def receive(self) -> Message | None:
        """Wait for the next message; None once the other end is gone."""
        files: list[int] = []
        head = self._exactly(_HEAD.size, files)
        if head is None:
            return None
        sizes = _HEAD.unpack(head)
        text, data = (self._exactly(size, files) for size in sizes)
        if text is None or data is None:
            return None
        kind, fields = json.loads(text)
        return Message(kind, fields, load(bytes(data)) if data else {}, files[0] if files else None)

    def close(self) -> None:
        """End the line, either way; whoever waits in ``receive`` gets None."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, count: int, files: list[int]) -> bytearray | None:
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            try:
                read, control, *_ = self._end.recvmsg_into([view[done:]], socket.CMSG_SPACE(_FILE.size))
            except OSError:
                read, control = 0, []
            files += [_FILE.unpack_from(data)[0] for *_, data in control]
            if read == 0:
                for file in files:
                    os.close(file)
                return None
            done += read
        return buffer


def pack_sampling(sampling: Sampling) -> dict[str, Any]:
    """Turn the settings into fields of a JSON message."""
    return asdict(sampling)


def unpack_sampling(fields: Mapping[str, Any]) -> Sampling:
    """Build again the settings that ``pack_sampling`` was given."""
    return Sampling(**{**fields, "stop_token_ids": tuple(fields["stop_token_ids"])})


def pack_request(request: GroupRequest) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Turn a request into the fields and tensors of a message."""
    fields, tensors = pack_samples(request.begun)
    prompt, shown = request.prompt_ids.contiguous(), request.images
    if shown is not None:
        tensors |= {"pixels": shown.pixels.contiguous(), "grid": shown.grid.contiguous()}
    asked = {"key": request.key, "seeds": request.seeds, "max_tokens": request.max_tokens, "begun": fields}
    asked["watched"] = request.watch is not None
    return asked, {"prompt_ids": prompt, **tensors}


def unpack_request(message: Message, watch: Watch | None = None) -> GroupRequest:
    """Build again the request that ``pack_request`` was given; ``watch`` stands in for one that it had."""
    fields = message.fields
    begun = unpack_samples(fields["begun"], message.tensors)
    prompt, seeds = message.tensors["prompt_ids"], tuple(fields["seeds"])
    shown = Images(message.tensors["pixels"], message.tensors["grid"]) if "pixels" in message.tensors else None
    watched = watch if fields["watched"] else None
    return GroupRequest(fields["key"], prompt, seeds, begun, fields["max_tokens"], shown, watched)


def pack_samples(samples: Sequence[SampleOutput]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Turn samples into fields, and tensors of all of them end to end."""
    fields = {"lengths": [len(s.token_ids) for s in samples], "reasons": [s.finish_reason for s in samples]}
    if not samples:
        return fields, {}
    recorded = [s.routes for s in samples if s.routes is not None]
    return fields, {
        "token_ids": torch.cat([s.token_ids for s in samples]),
        "logprobs": torch.cat([s.logprobs for s in samples]),
        "versions": torch.cat([s.versions for s in samples]),
        **({"routes": torch.cat(recorded)} if recorded else {}),
    }


def unpack_samples(fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[SampleOutput, ...]:
    """Build again the samples that ``pack_samples`` was given."""
    if not fields["lengths"]:
        return ()
    lengths, reasons = fields["lengths"], fields["reasons"]
    columns = (tensors[name].split(lengths) for name in ("token_ids", "logprobs", "versions"))
    routes = tensors["routes"].split(lengths) if "routes" in tensors else (None,) * len(lengths)
    return tuple(SampleOutput(*fields) for fields in zip(*columns, reasons, routes, strict=True))
