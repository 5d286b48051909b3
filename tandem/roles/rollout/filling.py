"""The rollout role: fills partitions. Tickets in, generated and scored groups out, into the data plane."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tandem.base.errors import RewardError, StarvationError
from tandem.base.phases import phase
from tandem.columns.proto import DataProto
from tandem.data.prompts import Prompt
from tandem.data.sampler import Sampler
from tandem.dataflow.dispatch import LengthHistory
from tandem.dataflow.gate import AtGate, Closed, Gate
from tandem.dataflow.store import DataPlane
from tandem.dataflow.tickets import Ticket
from tandem.reward.outcome import Scores
from tandem.reward.process.job import Handle
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.making import Beginning, Made, Making, SingleAnswers, make_groups
from tandem.roles.rollout.spare_groups import SpareGroups
from tandem.roles.rollout.utilization import ScoringWait
from tandem.rollout.protocol import RolloutEngine, Sampling

FAILED, FILTERED = "reward failed", "equal rewards"


@dataclass(frozen=True)
class Filling:
    """How groups are drawn and which of them are kept.

    ``seed`` is the run's; ``filter_equal`` drops groups without a signal; ``overlong`` says what becomes of answers cut
    at the token limit; ``deadline_s`` bounds every wait for the data plane. ``signal`` is the column in which samples
    of a group must differ for the estimator to learn from them. ``lengths`` is told how long the answers to each item
    of the source are.
    """

    sampling: Sampling
    seed: int
    filter_equal: bool
    overlong: Literal["train", "mask"]
    deadline_s: float
    signal: Literal["rewards", "reward_components"] = "rewards"
    lengths: LengthHistory = field(default_factory=LengthHistory)


@dataclass
class Pending:
    """A group that is being made: its prompt, and once it is generated the scoring under way."""

    prompt: Prompt
    handle: Handle | None = None
    truncated: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))


class Rollout:
    """One engine that works through the tickets that the gate admits.

    ``name`` is the engine's in the gate and in messages. Of the last partition filled, ``counts`` are the groups
    dropped by reason and ``report`` the scorer's own metrics. ``scoring_wait`` measures how long scores are waited for.
    ``making`` turns tickets into groups; by default each is one request of plain answers. ``spares``: the gate has
    tickets of more groups than a partition needs.
    """

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        source: Sampler[Prompt],
        rewards: RewardManager,
        plane: DataPlane,
        gate: Gate,
        filling: Filling,
        tokenizer: Any,
        scoring_wait: ScoringWait | None = None,
        making: Making | None = None,
        spares: SpareGroups | None = None,
    ) -> None:
        self.name = name
        self.scoring_wait = ScoringWait() if scoring_wait is None else scoring_wait
        self.engine = engine
        self.counts: Counter[str] = Counter()
        self.report: dict[str, float] = {}
        self._drops: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by partition
        self._source = source
        self._rewards = rewards
        self._plane = plane
        self._gate = gate
        self._filling = filling
        self._making = SingleAnswers(filling.sampling, tokenizer) if making is None else making
        self._spares = spares
        if spares is not None:
            spares.join(name, engine)

    def acknowledge(self, version: int) -> None:
        """Note that the engine generates with weights ``version`` from now on."""
        self._gate.acknowledge(self.name, version)

    def engines(self) -> dict[str, AtGate]:
        """Return the engines at its gate, by name."""
        return self._gate.engines()

    def fill(self, partition: int) -> None:
        """Fill every ticket of ``partition`` and seal it.

        Dropped groups are refilled in ticket order after each round, so that the draws don't depend on who finished
        first. Raises ``StarvationError`` where a ticket is drawn in vain too often, ``RewardError`` where not one
        sample could be scored.
        """
        scores: list[Scores] = []
        try:
            while self._round(scores):
                pass
        except StarvationError as error:
            raise StarvationError(f"{error}{first_failure(scores)}") from error
        finally:
            self.counts = self.take_counts(partition)
        self._plane.seal(partition, timeout=0.0)  # nobody else fills it: what is open now stays open
        require_rewards(scores, partition)
        self.report = Scores.joined(scores).report()

    def take_counts(self, partition: int) -> Counter[str]:
        """Count the groups of ``partition`` that were dropped, by reason."""
        return self._drops.pop(partition, Counter())

    def _round(self, scores: list[Scores]) -> int:
        """Generate a group for every ticket that is due; score them; how many of them were dropped."""
        pending: dict[Ticket, Pending] = {}
        by_key: dict[str, Ticket] = {}

        def begin() -> bool:
            while not isinstance(ticket := self._gate.admit(self.name), Closed):
                if self._begin(ticket, pending, by_key):
                    return True
            return False

        self.scoring_wait.generates(self.name, 1)
        with phase("groups") as shown:
            for made in make_groups(self.engine, self._making, begin):
                self._arrive(by_key[made.key], pending, made)
                shown.advance()
        self.scoring_wait.generates(self.name, -1)
        return sum(self._settle(ticket, pending[ticket], scores) for ticket in sorted(pending))

    def _begin(self, ticket: Ticket, pending: dict[Ticket, Pending], by_key: dict[str, Ticket]) -> bool:
        """Begin the group that fills ``ticket``, noted in ``pending`` and under its key; False where nobody wants it
        any more.
        """
        if self._spares is not None and not self._spares.begin(ticket):
            return False
        prompt, key = self._draw(ticket), str(ticket)
        pending[ticket], by_key[key] = Pending(prompt), ticket
        if not self._is_spare(ticket):
            self._plane.assign(ticket, self.name)
        self._making.begin(Beginning(key, prompt, ticket.place, (self._filling.seed, "sample", *ticket)))
        return True

    def _is_spare(self, ticket: Ticket) -> bool:
        return self._spares is not None and self._spares.is_spare(ticket)

    def _draw(self, ticket: Ticket) -> Prompt:
        """Draw the prompt of a ticket: a function of the ticket, whichever engine asks, and whether or not another has
        before.
        """
        if ticket.attempt > 0 or self._is_spare(ticket):
            return self._source.refill(*ticket)
        return self._source.draw(self._number(ticket))

    def _number(self, ticket: Ticket) -> int:
        """Return the draw that the first attempt of a ticket is."""
        tickets = self._gate.tickets if self._spares is None else self._spares.tickets
        return ticket.partition * tickets + ticket.place

    def _arrive(self, ticket: Ticket, pending: dict[Ticket, Pending], made: Made) -> None:
        """Store a finished group under the ticket that it fills, and those that it lets be stored."""
        if ticket.attempt == 0 and not self._is_spare(ticket):
            lengths = made.batch.ragged("responses").lengths[: self._filling.sampling.n]
            self._filling.lengths.note(self._source.item_of(self._number(ticket)), float(lengths.max()))
        if self._spares is None:
            self._store(ticket, pending, made)
            return
        group = pending.get(ticket)
        if group is None or group.handle is not None:  # another's group has filled its place
            self._spares.late(ticket, made)
            return
        del pending[ticket]
        for filled, (prompt, taken) in self._spares.arrived(self.name, ticket, group.prompt, made):
            pending[filled] = Pending(prompt)
            self._store(filled, pending, taken)

    def _store(self, ticket: Ticket, pending: dict[Ticket, Pending], made: Made) -> None:
        """Put a finished group into the plane and have it scored while others are generated."""
        group, batch = pending[ticket], made.batch
        sampling = self._filling.sampling
        drawn = batch[: sampling.n] if sampling.baseline else batch  # a greedy answer is scored and not trained
        self._plane.put([ticket], drawn, timeout=self._filling.deadline_s)
        group.truncated = drawn.dense("truncated")
        self.scoring_wait.scores(1)
        with self.scoring_wait.blocking(self.name):
            label = f"{ticket}, prompt {group.prompt.uid}"
            group.handle = self._rewards.submit(batch, label, made.verdicts)

    def _settle(self, ticket: Ticket, group: Pending, scores: list[Scores]) -> bool:
        """Store the rewards of a group, or drop it; says whether it was dropped."""
        assert group.handle is not None
        every, failed = self._rewards.collect(group.handle)
        self.scoring_wait.scores(-1)
        found = every.first(self._filling.sampling.n)
        scores.append(found)
        columns = self._rewards.columns(found)
        valid = columns["reward_valid"]
        signal = columns[self._filling.signal]
        if self._filling.sampling.baseline:
            baseline = columns["reward_baselines"] = torch.full_like(columns["rewards"], every.rewards[-1])
            valid &= baseline.isfinite()  # in place: the column too
            signal = signal - baseline
        if self._filling.overlong == "mask":
            valid &= ~group.truncated
        reason: str | None = None
        if failed or (self._filling.filter_equal and not any(found.valid)):
            reason = FAILED
        elif self._filling.filter_equal and _equal(signal[valid], centred=self._filling.sampling.baseline):
            reason = FILTERED
        if reason is not None:
            self._drops[ticket.partition][reason] += 1
            self._plane.drop(ticket, reason)
            if self._spares is not None:
                self._spares.dropped(ticket)
            self._gate.redraw(ticket)
            return True
        self._plane.put([ticket], DataProto(columns, {"scoring": found.remarks()}), timeout=self._filling.deadline_s)
        self._gate.done(ticket)
        return False


def require_rewards(scores: Iterable[Scores], partition: int) -> None:
    """Raise ``RewardError`` where not one sample of ``partition`` could be scored."""
    joined = Scores.joined(scores)
    if not any(joined.valid):
        raise RewardError(
            f"not one of the {len(joined)} samples of step {partition + 1} has a reward, so there is nothing to "
            f"learn from{first_failure([joined])}"
        )


def first_failure(scores: Iterable[Scores]) -> str:
    """Return the first scoring that failed, for a message."""
    joined = Scores.joined(scores)
    failures = ((name, reason) for name, reason in zip(joined.names, joined.reasons, strict=True) if reason)
    name, reason = next(failures, ("", ""))
    return f". The first scoring that failed was of {name}: {reason}" if name else ""


def _equal(rewards: torch.Tensor, *, centred: bool) -> bool:
    """Return whether the rewards (B,) or their components (B, K) say nothing about which sample was better.

    ``centred``: they are told from a baseline of their own, which must differ from one of them.
    """
    if centred:
        return not bool(rewards.any())
    return len(rewards) < 2 or bool((rewards == rewards[0]).all())
