"""An engine with weights of its own in a loop of one's own: it is sent the actor's whenever it is to generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.base.errors import ContractError
from tandem.roles.probing import ask
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, Sampling, Supervised
from tandem.weights.probe import Answer, Probe
from tandem.weights.sync import Snapshot, Weights, WeightSync

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Receiving:
    """An engine as the receiver of weights that can be asked; ``logprobs``: it tells some."""

    engine: RolloutEngine
    logprobs: bool

    def load(self, weights: Weights, version: int) -> str | None:
        """Take the weights over."""
        return self.engine.load(weights, version)

    def answer(self, prompts: Sequence[torch.Tensor]) -> list[Answer]:
        """Answer with the likeliest next tokens."""
        return ask(self.engine, prompts, self.logprobs)


class FollowingEngine:
    """A ``RolloutEngine`` over ``engine``, to which the actor's weights are sent at each ``load(None, version)``.

    ``snapshot`` copies them, and ``require_actor`` refuses others. The engine must answer their fingerprint and, where
    the ``probe`` says so, the actor's likeliest tokens; it has ``deadline_s`` for the weights. ``logprobs``: it tells
    some.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        snapshot: Callable[[], Snapshot],
        probe: Probe,
        *,
        name: str,
        require_actor: Callable[[str], None],
        logprobs: bool,
        deadline_s: float,
    ) -> None:
        self._engine, self._snapshot, self._probe, self._name = engine, snapshot, probe, name
        self._require_actor, self._logprobs, self._deadline_s = require_actor, logprobs, deadline_s

    @property
    def version(self) -> int:
        return self._engine.version

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        """Send the actor's weights of this moment as ``version``. An engine that fails its proof has none to serve.

        They are sent whatever the version: nothing tells whether they were changed by other hands than the actor's.
        """
        if weights is not None:
            raise ContractError("this engine is sent the actor's own weights: call load(None, version)")
        sync = WeightSync(
            self._snapshot,
            {self._name: _Receiving(self._engine, self._logprobs)},
            require_actor=self._require_actor,
            acknowledged=lambda name, version: None,
            probe=self._probe,
            deadline_s=self._deadline_s,
        )
        sync.push(version)
        return None

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        return self._engine.generate(requests, sampling)

    def pause(self, abort: bool = False) -> None:
        self._engine.pause(abort)

    def resume(self) -> None:
        self._engine.resume()

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        """End the engine's process, where it has one."""
        if isinstance(self._engine, Supervised):
            self._engine.close()
