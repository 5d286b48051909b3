"""Requests with one prompt: the first computes its keys and values, the others wait for them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")


@dataclass
class _Prompt(Generic[R]):
    first: str
    others: dict[str, R] = field(default_factory=dict)


class SharedPrompts(Generic[R]):
    """For an engine that shares a prompt only with what has been computed before, not within one prefill."""

    def __init__(self) -> None:
        self._next: dict[str, R] = {}
        self._prompts: dict[Hashable, _Prompt[R]] = {}
        self._of: dict[str, Hashable] = {}  # the prompt of each request that waits, or is waited for

    def add(self, key: str, prompt: Hashable, request: R) -> None:
        """Add a request; it is taken next unless one with its prompt is under way that has drawn nothing yet."""
        self._of[key] = prompt
        if prompt in self._prompts:
            self._prompts[prompt].others[key] = request
        else:
            self._prompts[prompt] = _Prompt(key)
            self._next[key] = request

    def take(self) -> list[R]:
        """Return the requests that can be given to the engine now, once."""
        taken, self._next = self._next, {}
        return list(taken.values())

    def begun(self, key: str) -> None:
        """Note that the engine has drawn for this request: those that wait for its prompt can be taken."""
        prompt = self._of.get(key)
        if prompt is None or self._prompts[prompt].first != key:
            return
        waiting = self._prompts.pop(prompt).others
        for other in (key, *waiting):
            del self._of[other]
        self._next |= waiting

    def remove(self, key: str) -> bool:
        """Forget this request; return whether the engine has not been given it."""
        prompt = self._of.pop(key, None)
        if prompt is None:
            return self._next.pop(key, None) is not None
        shared = self._prompts[prompt]
        if shared.first != key:
            del shared.others[key]
            return True
        del self._prompts[prompt]
        if shared.others:  # one of them is the first now
            first = next(iter(shared.others))
            self._prompts[prompt] = _Prompt(first, shared.others)
            self._next[first] = shared.others.pop(first)
        return self._next.pop(key, None) is not None
