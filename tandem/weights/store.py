"""Weight tags: named copies of the actor's weights that take its place for a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from tandem.base.errors import ContractError
from tandem.base.interrupts import held

ACTOR = "actor"


class WeightStore:
    """Copies of the trainable weights by tag; what is in place is one of them.

    ``live`` are the local shards of the trained parameters, by name: the store copies into and out of them and never
    rebinds them, because a sharded module gathers from storage of its own. A switch is bit-exact and costs memory
    traffic only. Weights that aren't trained are the same under every tag and are not copied. A tag may also be
    *defined* by what puts it in place, such as adapters that are switched off: then it costs no copy at all.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], device: torch.device | None = None) -> None:
        self._live = {name: tensor.detach() for name, tensor in live.items()}
        self._device = device
        self._copies: dict[str, dict[str, torch.Tensor]] = {}
        self._defined: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        self._in_place = ACTOR

    @property
    def in_place(self) -> str:
        """The tag whose weights the module holds now."""
        return self._in_place

    @property
    def tags(self) -> list[str]:
        """Saved and defined tags, sorted."""
        return sorted({*self._copies, *self._defined})

    def define(self, tag: str, place: Callable[[], AbstractContextManager[None]]) -> None:
        """Let ``tag`` be what ``place`` puts in place for a block, without a copy; a later ``save`` makes it one."""
        self._defined[tag] = place

    def save(self, tag: str) -> None:
        """Copy the weights in place into ``tag``, made on first use."""
        if tag == ACTOR:
            self.require_actor("back the actor up")
        self._defined.pop(tag, None)
        copies = self._copies.setdefault(tag, {})
        for name, tensor in self._live.items():
            if name in copies:
                copies[name].copy_(tensor)
            else:
                copies[name] = self._new_copy(tensor)

    def put(self, tag: str, copies: Mapping[str, torch.Tensor]) -> None:
        """Let ``tag`` hold weights that come from elsewhere: by the names of the live ones, copied."""
        if tag == ACTOR:
            raise ContractError("the actor's weights are the live ones: copy into them to change them")
        self._copies[tag] = {name: self._new_copy(copies[name]) for name in self._live}

    def copy(self, source: str, target: str) -> None:
        """Make ``target`` equal to the saved tag ``source``."""
        copies = self._copies.setdefault(target, {})
        for name, tensor in self._saved(source).items():
            copies[name] = tensor.clone()

    @contextmanager
    def using(self, tag: str) -> Iterator[None]:
        """Put ``tag`` in place for the block; the actor returns afterwards, also on an error."""
        if tag == self._in_place:
            yield
            return
        if tag in self._defined:
            with self._switched(tag):
                yield
            return
        chosen = self._saved(tag)
        self.save(ACTOR)
        try:
            self._in_place = tag
            self._load(chosen)
            yield
        finally:
            with held():  # half of a switch is neither
                self._load(self._copies[ACTOR])
                self._in_place = ACTOR

    def require_actor(self, purpose: str) -> None:
        """Refuse ``purpose`` unless the actor's own weights are in place."""
        if self._in_place != ACTOR:
            raise ContractError(f"can't {purpose}: tag {self._in_place!r} is in place; leave its `using` block first")

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the saved tags but the actor's, which the engine saves itself."""
        return {tag: copies for tag, copies in self._copies.items() if tag != ACTOR}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Restore saved tags; the weights in place stay as they are."""
        for tag, copies in state.items():
            self._copies[tag] = {name: self._new_copy(copies[name]) for name in self._live}

    @contextmanager
    def _switched(self, tag: str) -> Iterator[None]:
        """Put a defined tag in place of the actor."""
        self.require_actor(f"switch to {tag!r}")
        with self._defined[tag]():
            self._in_place = tag
            try:
                yield
            finally:
                self._in_place = ACTOR

    def _saved(self, tag: str) -> dict[str, torch.Tensor]:
        if tag not in self._copies:
            raise ContractError(f"weight tag {tag!r} was never saved; saved: {self.tags}")
        return self._copies[tag]

    def _new_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device if self._device is None else self._device
        pinned = device.type == "cpu" and tensor.device.type == "cuda"
        return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)

    def _load(self, copies: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self._live.items():
            tensor.copy_(copies[name], non_blocking=True)  # from pinned memory; what reads it comes after
