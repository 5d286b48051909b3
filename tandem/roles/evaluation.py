"""Scores on held-out prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from tandem.base.errors import RewardError
from tandem.base.phases import phase
from tandem.columns.proto import DataProto
from tandem.data.prompts import Prompt
from tandem.reward.outcome import Scores
from tandem.roles.batch_metrics import episode_metrics
from tandem.roles.reward import RewardManager
from tandem.roles.rollout.filling import first_failure
from tandem.roles.rollout.making import Beginning, MakeGroups, SingleAnswers, make_groups
from tandem.rollout.protocol import RolloutEngine, Sampling

SOLVED = 1.0
"""A sample with at least this reward passes."""


@dataclass(frozen=True)
class Answer:
    """One sample of an evaluation."""

    prompt: Prompt
    response: str
    reward: float
    tokens: int


def pass_at_k(solved: int, n: int, k: int) -> float:
    """Return the probability that one of ``k`` samples passes, from ``solved`` of ``n`` (arXiv 2107.03374, equation
    1).
    """
    return 1.0 - comb(n - solved, k) / comb(n, k)


class Evaluator:
    """Answers held-out ``prompts`` with sampling settings of its own, and scores them.

    ``k`` are the pass@k to report. The random streams depend on ``seed``, the prompt and the sample's index only, so
    two evaluations of equal weights agree.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        rewards: RewardManager,
        tokenizer: Any,
        *,
        k: Sequence[int] = (),
        seed: int = 0,
        make: MakeGroups = SingleAnswers,
    ) -> None:
        self._engine = engine
        self._prompts = list(prompts)
        self._sampling = sampling
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._k = tuple(k)
        self._seed = seed
        self._make = make
        self._scores: list[Scores] = []
        self._batches: list[DataProto] = []

    def answers(self) -> list[list[Answer]]:
        """Return n answers to each prompt, in the order of the prompts."""
        making, left = self._make(self._sampling, self._tokenizer), iter(enumerate(self._prompts))

        def begin() -> bool:
            number, prompt = next(left, (-1, None))
            if prompt is not None:
                making.begin(Beginning(str(number), prompt, number, (self._seed, "evaluation")))
            return prompt is not None

        scored = {}
        with phase("evaluation", len(self._prompts)) as shown:
            for made in make_groups(self._engine, making, begin):
                number, batch = int(made.key), made.batch
                label = f"held-out prompt {self._prompts[number].uid}"
                texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in batch.ragged("responses")]
                lengths = batch.ragged("responses").lengths.tolist()
                scored[number] = batch, texts, lengths, self._rewards.submit(batch, label, made.verdicts)
                shown.advance()
        groups, self._scores, self._batches = [], [], []
        for number, prompt in enumerate(self._prompts):
            batch, texts, lengths, handle = scored[number]
            scores, _ = self._rewards.collect(handle)
            self._scores.append(scores)
            self._batches.append(batch.union(DataProto(self._rewards.columns(scores), {"scoring": scores.remarks()})))
            rows = zip(texts, scores.rewards, lengths, strict=True)
            groups.append([Answer(prompt, *row) for row in rows])
        return groups

    def answered(self) -> DataProto:
        """Return the last answers as columns, scored, in the order of the prompts."""
        return DataProto.concat(self._batches)

    def require_scored(self) -> None:
        """Raise ``RewardError`` where not one of the last answers could be scored: a mean of nothing is no result."""
        joined = Scores.joined(self._scores)
        if not any(joined.valid):
            raise RewardError(f"not one of the {len(joined)} answers could be scored{first_failure([joined])}")

    def metrics(self, groups: Sequence[Sequence[Answer]]) -> dict[str, float]:
        """Return ``eval/reward`` (mean over all samples, also named mean@n), ``eval/pass@k``, one mean per data source,
        and what is counted in episodes as ``eval/episode/...``.

        An answer whose scoring failed counts in none of them but in ``eval/failed``.
        """
        metrics: dict[str, float] = {}
        by_source: defaultdict[str, list[float]] = defaultdict(list)
        passes: dict[int, list[float]] = {k: [] for k in self._k}
        failed = 0
        for group in groups:
            rewards = [answer.reward for answer in group if answer.reward == answer.reward]
            failed += len(group) - len(rewards)
            by_source[group[0].prompt.data_source].extend(rewards)
            solved = sum(reward >= SOLVED for reward in rewards)
            for k, found in passes.items():
                if len(rewards) >= k:
                    found.append(pass_at_k(solved, len(rewards), k))
        every = [reward for rewards in by_source.values() for reward in rewards]
        metrics["eval/reward"] = metrics[f"eval/mean@{self._sampling.n}"] = _mean(every)
        metrics["eval/failed"] = float(failed)
        metrics["eval/scored_share"] = len(every) / (len(every) + failed) if every or failed else 0.0
        metrics["eval/length"] = _mean([float(answer.tokens) for group in groups for answer in group])
        metrics |= {f"eval/pass@{k}": _mean(found) for k, found in passes.items()}
        if len(by_source) > 1:
            metrics |= {f"eval/reward/{source}": _mean(rewards) for source, rewards in by_source.items()}
        fields = [batch.non_tensor_batch for batch in self._batches]
        played = [one for own in fields if "episode" in own for one in own["episode"]]
        return metrics | ({f"eval/{name}": value for name, value in episode_metrics(played).items()} if played else {})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
