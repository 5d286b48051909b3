"""A bandit with four arms in each of two situations, learned by the library's own advantage, correction and loss code.

An answer is two tokens, each an arm; the reward is the fraction of them that is the situation's best arm, plus noise.
The policy is a table of logits, so that everything a stage of a run would give is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.schema import AlgorithmConfig
from tandem.roles.advantages import AdvantageStage
from tandem.roles.correction import corrected, mismatch_report
from tandem.train.objective import PolicyObjective, trained_mask

PROMPTS, TOKENS, ARMS, SITUATIONS = 8, 2, 4, 2
START = 1 / ARMS
"""Expected reward of the uniform policy."""


@dataclass
class Bandit:
    """One run. ``n`` samples per prompt; ``stale``: samples come from the policy of so many steps before.

    ``updates`` optimizer steps are made on each partition, the last ones off-policy. ``metrics`` are of the last step,
    ``rejected`` is the largest fraction of tokens that a correction left out of any.
    """

    algorithm: AlgorithmConfig
    seed: int
    n: int = 8
    stale: int = 0
    updates: int = 2
    lr: float = 0.1
    metrics: dict[str, float] = field(default_factory=dict)
    rejected: float = 0.0

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        self.logits = torch.zeros(SITUATIONS, ARMS, dtype=torch.float64, requires_grad=True)
        self.reference = torch.full((SITUATIONS, ARMS), START, dtype=torch.float64).log()
        self._history: list[torch.Tensor] = []
        self._best = torch.tensor([1, 3])
        self._stage = AdvantageStage.of(self.algorithm)
        loss, kl = self.algorithm.policy_loss, self.algorithm.kl
        self._objective = PolicyObjective(
            loss.type,
            loss.parameters,
            self.algorithm.loss_agg_mode,
            4.0,
            kl.type,
            kl.coef if kl.where == "loss" else 0.0,
        )
        self._optimizer = torch.optim.Adam([self.logits], lr=self.lr)

    @property
    def expected(self) -> float:
        """The policy's expected reward."""
        probabilities = self.logits.detach().softmax(-1)
        return float(probabilities[torch.arange(SITUATIONS), self._best].mean())

    @property
    def kl(self) -> float:
        """KL(policy || reference), mean over situations."""
        now = self.logits.detach().log_softmax(-1)
        return float((now.exp() * (now - self.reference)).sum(-1).mean())

    def run(self, steps: int) -> float:
        """Train; the expected reward in the end."""
        for _ in range(steps):
            self._step()
        return self.expected

    def _step(self) -> None:
        now = self.logits.detach().log_softmax(-1)
        self._history.append(now)
        batch = self._sampled(self._history[max(0, len(self._history) - 1 - self.stale)], now)
        correction = self.algorithm.correction
        batch = self._stage(corrected(batch, correction) if correction.gives else batch)
        self.metrics = mismatch_report(batch, correction) | self._stage.metrics
        self.rejected = max(self.rejected, self.metrics["mismatch/rejected"])
        optional = [name for name in self._objective.optional_columns if name in batch.batch]
        columns = {name: batch.padded(name) for name in (*self._objective.columns, *optional)}
        for name in ("response_mask", "loss_mask"):
            if name in batch.batch:
                columns[name] = batch.padded(name).bool()
        for _ in range(self.updates):
            if not bool(trained_mask(batch).values.any()):
                return
            logprobs = self._of(self.logits.log_softmax(-1))
            total = self._objective.numerator(columns, logprobs, None)
            self._optimizer.zero_grad()
            (total.loss / self._objective.denominator(batch)).backward()
            self._optimizer.step()

    def _sampled(self, behaviour: torch.Tensor, now: torch.Tensor) -> DataProto:
        """A partition under the policy ``behaviour``, with all columns that any estimator reads."""
        count = PROMPTS * self.n
        groups = torch.arange(PROMPTS).repeat_interleave(self.n)
        self._situations = groups % SITUATIONS
        chances = behaviour.exp()[self._situations]
        self._arms = torch.multinomial(chances, TOKENS, replacement=True, generator=self._random)
        hits = (self._arms == self._best[self._situations].unsqueeze(-1)).double()
        noise = 0.1 * torch.randn(count, generator=self._random, dtype=torch.float64)
        greedy = (now.argmax(-1) == self._best)[self._situations].double()
        level = now.exp()[torch.arange(SITUATIONS), self._best][self._situations]  # what a perfect critic knows
        layout = Ragged.from_lengths(torch.ones(count * TOKENS, dtype=torch.bool), [TOKENS] * count)

        def ragged(table: torch.Tensor) -> Ragged:
            return layout.like(table.flatten().float())

        return DataProto(
            {
                "responses": layout.like(self._arms.flatten()),
                "response_mask": layout,
                "group_ids": groups,
                "rewards": (hits.mean(-1) + noise).float(),
                "reward_valid": torch.ones(count, dtype=torch.bool),
                "reward_baselines": greedy.float(),
                "reward_components": torch.stack([hits.mean(-1) + noise, 100 * hits[:, 0]], -1).float(),
                "values": ragged(torch.stack([level, (hits[:, 0] + level) / 2], -1)),
                "sum_pi_squared": ragged(now.exp().square().sum(-1)[self._situations].unsqueeze(-1).expand(-1, TOKENS)),
                "rollout_logprobs": ragged(self._of(behaviour)),
                "old_logprobs": ragged(self._of(now)),
                "ref_logprobs": ragged(self._of(self.reference)),
            }
        )

    def _of(self, table: torch.Tensor) -> torch.Tensor:
        """Log-probs (B, T) of the arms that were drawn."""
        return table[self._situations].gather(-1, self._arms)


def learned(config: dict[str, Any], *, steps: int = 12, **options: Any) -> list[float]:
    """What three runs with different seeds gain over the uniform policy."""
    algorithm = AlgorithmConfig.model_validate(config)
    return [Bandit(algorithm, seed, **options).run(steps) - START for seed in range(3)]
