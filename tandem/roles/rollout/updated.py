"""A rollout worker as whoever brings new weights sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tandem.base.errors import DeadlineError, TandemError
from tandem.config.model import OnWeightUpdate
from tandem.dataflow.gate import Gate
from tandem.roles.probing import ask
from tandem.roles.rollout.causes import silence
from tandem.roles.rollout.worker import RolloutWorker
from tandem.rollout.process import HostedEngine
from tandem.rollout.protocol import EngineStats
from tandem.weights.broadcast import Member
from tandem.weights.probe import Answer


class UpdatedWorker:
    """A rollout worker as the receiver of new weights: what is being generated obeys ``on_update``.

    ``wait``: it is finished first, under the old weights, and nothing is begun. ``abort``: it ends where it is and goes
    on as the request stream says. ``keep``: it goes on, and its tokens carry their versions.

    ``logprobs``: the engine gives some. ``asleep``: it is when weights come, and wakes for a question.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        gate: Gate,
        on_update: OnWeightUpdate,
        drain_s: float,
        *,
        logprobs: bool = True,
        asleep: bool = False,
    ) -> None:
        self.name = worker.name
        self._worker, self._gate, self._on_update, self._drain_s = worker, gate, on_update, drain_s
        self._logprobs, self._asleep = logprobs, asleep
        self._draining = False

    def members(self, version: int) -> Sequence[Member]:
        """Return the process of the engine, for a broadcast; none where it is in this one."""
        del version
        engine = self._worker.engine
        return (engine,) if isinstance(engine, HostedEngine) else ()

    def prepare(self, version: int) -> None:
        """Return once what is being generated is where it may be when ``load`` comes.

        Raises ``DeadlineError`` where generation doesn't end in time.
        """
        if self._on_update != "wait":
            return
        name = self.name
        self._gate.pause(name, f"it finishes what it has before weights version {version}")
        self._draining = True
        if not self._worker.drain(self._drain_s):
            quiet = silence(self._worker)
            raise DeadlineError(
                f"waited {self._drain_s:g} s for {name} to finish its groups before weights version {version}"
                + (f"; {quiet}" if quiet else "")
            )
        self._draining = False

    def doing(self) -> str:
        """Return what keeps it from having the weights, in words; nothing where it is just loading them."""
        causes = ["finishes its groups first" if self._draining else "", silence(self._worker)]
        return " and ".join(cause for cause in causes if cause)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
        """Hand ``weights`` to the engine, which is prepared for them."""
        try:
            return self._load(weights, version)
        except TandemError:
            self._worker.check()  # what ended the loop is the reason
            raise

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> str | None:
        worker, engine = self._worker, self._worker.engine
        if self._on_update == "abort":
            engine.pause(abort=True)
        fingerprint = engine.load(weights, version)
        if self._on_update == "abort":
            engine.resume()
        self._gate.resume(worker.name)
        return fingerprint

    def answer(self, prompts: Sequence[torch.Tensor]) -> list[Answer]:
        """Return the engine's own answers to ``prompts``, to be compared with the actor's."""
        engine = self._worker.engine
        if self._asleep:
            engine.wake()
        answers = ask(engine, prompts, self._logprobs)
        if self._asleep:
            engine.sleep()
        return answers

    def ping(self, deadline_s: float) -> int:
        """Return the version that the engine has; raises what ended its loop, if anything did."""
        self._worker.check()
        engine = self._worker.engine
        return engine.ping(deadline_s) if isinstance(engine, EngineStats) else engine.version

    @property
    def applied_s(self) -> float:
        """Seconds for which the last ``load`` kept the engine from working."""
        engine = self._worker.engine
        return engine.applied_s if isinstance(engine, EngineStats) else 0.0
