"""The best possible step of each mode, from the parts of a step. Pure.

Work is split over devices without loss and everything that may overlap does: no run is faster, and the fraction of the
limit that a run reaches says how well it is scheduled. Each limit is a maximum of terms, and the largest says *why*.

With R, F, T = rollout, forward and train work over their devices, L = the latency of rollout (max of R and the longest
sample, which more devices don't make shorter) and m sub-batches, a step can't be shorter than

- what keeps one side busy: the actor F + A + T, the rollout engines R and the scores that they wait for, each with its
  share of a push;
- the way of a sample from its ticket to the weights that admit the next ticket of its line, L + F/m + A + T + push:
  the gate holds s + 1 partitions, so that many steps share it.

At s = 0 a step *is* that way, by two routes: the last sub-batch arrives after L and costs F/m; or the first arrives
after R/m, and the forwards of all follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tandem.base.errors import ContractError

Mode = Literal["colocate", "hybrid", "fully_async"]


class Bound(StrEnum):
    """What a step can't be shorter than."""

    TURNS = "turn-taking"
    ROLLOUT = "rollout-bound"
    FORWARD = "forward-bound"
    TRAIN = "train-bound"
    PUSH = "push-bound"
    LATENCY = "staleness-latency-bound"
    REWARDS = "reward-bound"


@dataclass(frozen=True)
class Parts:
    """The parts of one step, measured.

    ``rollout, reference, old, train`` are work in device-seconds. The rest are seconds of the clock: the ``longest``
    sample; ``rewards``, in which answers are scored and nothing is generated; ``advantages`` over the partition;
    ``turns``, all sleeping, waking and copying of a colocate step; ``push``, a blocking transfer of weights; or,
    overlapped: ``snapshot`` on the actor, ``broadcast`` in the background, ``swap`` while the engines stand.
    """

    rollout: float
    train: float
    reference: float = 0.0
    old: float = 0.0
    longest: float = 0.0
    rewards: float = 0.0
    advantages: float = 0.0
    turns: float = 0.0
    push: float = 0.0
    snapshot: float = 0.0
    broadcast: float = 0.0
    swap: float = 0.0

    def __post_init__(self) -> None:
        negative = {name: value for name, value in vars(self).items() if not value >= 0}
        if negative:
            raise ContractError(f"parts of a step are seconds, 0 or more; got {negative}")

    @property
    def forward(self) -> float:
        """All passes between the rewards and the train call, device-seconds."""
        return self.reference + self.old

    @property
    def work(self) -> float:
        """Everything that devices must do in a step, device-seconds."""
        return self.rollout + self.forward + self.train


@dataclass(frozen=True)
class Setting:
    """How a step is run: the mode, the devices of each role (``rollout`` has all of them in colocate; ``reference`` and
    ``actor_fwd`` are roles in fully_async only), m sub-batches, s = ``staleness``.

    ``overlap``: the push goes on behind the next step. ``pipelined``: sub-batches are trained as they arrive.
    ``drains``: running samples end before weights change (``on_weight_update: wait``). ``at_once``: the engines have
    room for a whole partition, so that its samples begin together. With both, the longest sample of one step can't
    hide behind the next one; where it may begin later, it can run beside that of the next partition. ``further`` are
    the keys of times of plug-ins' stages.
    """

    mode: Mode
    rollout: int
    actor: int = 0
    reference: int = 0
    actor_fwd: int = 0
    sub_batches: int = 1
    staleness: int = 0
    overlap: bool = False
    pipelined: bool = False
    drains: bool = False
    at_once: bool = False
    further: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        needed = {"rollout": self.rollout, "sub_batches": self.sub_batches}
        if self.streams:
            needed["actor"] = self.actor
        if self.mode == "fully_async":
            needed["actor_fwd"] = self.actor_fwd
        missing = [name for name, count in needed.items() if count < 1]
        if missing or min(self.staleness, self.actor, self.reference, self.actor_fwd) < 0:
            raise ContractError(f"{self}: {', '.join(missing) or 'counts'} must be positive")

    @property
    def streams(self) -> bool:
        """Whether rollout and actor have devices of their own, so that generation goes on beside training."""
        return self.mode != "colocate"

    @property
    def devices(self) -> int:
        """The number of devices of all roles together."""
        return self.rollout + self.actor + self.reference + self.actor_fwd


@dataclass(frozen=True)
class Term:
    """One thing that a step can't be shorter than: ``addends`` in seconds, shared by ``steps`` steps."""

    bound: Bound
    addends: Mapping[str, float]
    steps: int = 1

    @property
    def seconds(self) -> float:
        """The seconds that this term adds to a step."""
        return sum(self.addends.values()) / self.steps

    def __str__(self) -> str:
        added = " + ".join(f"{name} {value:.3g}" for name, value in self.addends.items() if value > 0) or "nothing"
        shared = f" = {sum(self.addends.values()):.3g} s shared by {self.steps} steps" if self.steps > 1 else ""
        return f"{self.bound}: {added}{shared} = {self.seconds:.3g} s"


@dataclass(frozen=True)
class Limit:
    """The best possible step, and what it can't be shorter than."""

    terms: tuple[Term, ...]

    @property
    def binding(self) -> Term:
        """The term that the step can't get below."""
        return max(self.terms, key=lambda term: term.seconds)

    @property
    def seconds(self) -> float:
        """The seconds of the best possible step."""
        return self.binding.seconds

    @property
    def bound(self) -> Bound:
        """The kind of the term that binds."""
        return self.binding.bound


def best_step(parts: Parts, setting: Setting) -> Limit:
    """Return the limit of ``setting`` for a step of these ``parts``."""
    if setting.mode == "colocate":
        return _colocate(parts, setting)
    if setting.mode == "fully_async":
        return _fully_async(parts, setting)
    return _synchronous(parts, setting) if setting.staleness == 0 else _hybrid(parts, setting)


def perfect_step(parts: Parts, devices: int) -> float:
    """Return t0, the step with all devices busy all the time. No mode is faster."""
    return parts.work / devices


def _term(bound: Bound, addends: Mapping[str, float], steps: int = 1) -> Term:
    """Return the term; one of which most is the wait for scores is bound by the rewards."""
    slow = 0 < addends["rewards"] == max(addends.values())
    return Term(Bound.REWARDS if slow else bound, addends, steps)


def _latency(parts: Parts, devices: int) -> float:
    return max(parts.rollout / devices, parts.longest)


def _throughput(parts: Parts, setting: Setting) -> float:
    """Return the seconds that the rollout engines need per step in the long run."""
    return _latency(parts, setting.rollout) if setting.drains and setting.at_once else parts.rollout / setting.rollout


def _push(parts: Parts, setting: Setting) -> dict[str, float]:
    """Return the seconds from the trained weights to their acknowledgement."""
    if setting.overlap:
        return {"snapshot": parts.snapshot, "broadcast": parts.broadcast, "swap": parts.swap}
    return {"push": parts.push}


def _standing(setting: Setting) -> tuple[str, str]:
    """Return the part of a push for which the actor stands, and for which the engines do."""
    return ("snapshot", "swap") if setting.overlap else ("push", "push")


def _colocate(parts: Parts, setting: Setting) -> Limit:
    n = setting.rollout
    addends = {
        "rollout": _latency(parts, n),
        "rewards": parts.rewards,
        "forward": parts.forward / n,
        "advantages": parts.advantages,
        "train": parts.train / n,
        "turns": parts.turns,
    }
    return Limit((_term(Bound.TURNS, addends),))


def _synchronous(parts: Parts, setting: Setting) -> Limit:
    """Return the limit of hybrid with s = 0. Pipelined, training is one more thing that follows sub-batch by
    sub-batch.
    """
    n, m = setting.actor, setting.sub_batches
    last, all_ = {"forward / m": parts.forward / n / m}, {"forward": parts.forward / n}
    train = {"train": parts.train / n}
    if setting.pipelined:
        last["train / m"] = train["train"] / m
        all_ |= train
        train = {}
    after = {"advantages": parts.advantages, **train, **_push(parts, setting)}
    return Limit(
        (
            _term(
                Bound.ROLLOUT,
                {"rollout": _latency(parts, setting.rollout), "rewards": parts.rewards, **last, **after},
            ),
            Term(Bound.FORWARD, {"rollout / m": parts.rollout / setting.rollout / m, **all_, **after}),
        )
    )


def _hybrid(parts: Parts, setting: Setting) -> Limit:
    """Return the limit of hybrid execution with a staleness of at least 1."""
    n, m, push = setting.actor, setting.sub_batches, _push(parts, setting)
    train, streamed = {"train": parts.train / n}, {"forward / m": parts.forward / n / m}
    actor = {"forward": parts.forward / n, "advantages": parts.advantages, **train}
    if setting.pipelined:
        streamed["train / m"] = train["train"] / m
        train = {}
    on_actor, on_engines = _standing(setting)
    chain = {**_generation(parts, setting), **streamed, "advantages": parts.advantages, **train, **push}
    terms = [
        Term(Bound.TRAIN, {**actor, on_actor: push[on_actor]}),
        _term(
            Bound.ROLLOUT,
            {"rollout": _throughput(parts, setting), "rewards": parts.rewards, on_engines: push[on_engines]},
        ),
        _term(Bound.LATENCY, chain, setting.staleness + 1),
    ]
    if setting.overlap:  # one push at a time: the next begins when all engines have acknowledged
        terms.append(Term(Bound.PUSH, push))
    return Limit(tuple(terms))


def _generation(parts: Parts, setting: Setting) -> dict[str, float]:
    """Return the seconds from a partition's admission, at the acknowledgement of version k - s, to its last group.

    The pushes up to version k come before step k: each makes running samples stand, or comes after them. Of overlapped
    pushes the last may still be under way.
    """
    s, latency = setting.staleness, {"rollout": _latency(parts, setting.rollout), "rewards": parts.rewards}
    if setting.overlap:
        return {**latency, "earlier swaps": max(0, s - 1) * parts.swap}
    return {**latency, "earlier pushes": s * parts.push}


def _fully_async(parts: Parts, setting: Setting) -> Limit:
    """Return the limit where each role works for itself, the reference and the actor's forward side by side."""
    m = setting.sub_batches
    reference = parts.reference / max(1, setting.reference)
    old, train = parts.old / setting.actor_fwd, parts.train / setting.actor
    forward = {"reference": reference} if reference > old else {"actor_fwd": old}
    push = _push(parts, setting)
    after = {"advantages": parts.advantages, "train": train, **push}
    last = {f"{name} / m": seconds / m for name, seconds in forward.items()}
    terms = [_term(Bound.LATENCY, {**_generation(parts, setting), **last, **after}, setting.staleness + 1)]
    if setting.staleness == 0:
        early = {"rollout / m": parts.rollout / setting.rollout / m}
        return Limit((*terms, Term(Bound.FORWARD, {**early, **forward, **after})))
    on_actor, on_engines = _standing(setting)
    terms += [
        Term(Bound.TRAIN, {"train": train, on_actor: push[on_actor]}),
        _term(
            Bound.ROLLOUT,
            {"rollout": _throughput(parts, setting), "rewards": parts.rewards, on_engines: push[on_engines]},
        ),
        Term(Bound.FORWARD, forward),
        Term(Bound.PUSH, push),
    ]
    return Limit(tuple(terms))
