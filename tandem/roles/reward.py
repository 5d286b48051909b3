"""The reward role: a batch in, one score per sample out, whatever the scorer is and wherever it runs."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from tandem.base.deadline import Deadline
from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.config.schema import NO_REWARD, Config, RewardConfig
from tandem.models.chat_template import set_template
from tandem.models.tokenizer import load_tokenizer
from tandem.reward.failures import Failures
from tandem.reward.outcome import Scores, Verdict, apply_policy
from tandem.reward.parts import component_names
from tandem.reward.process.inline import InlineScoring
from tandem.reward.process.job import Handle
from tandem.reward.process.pool import ScoringPool
from tandem.reward.registry import REWARDS
from tandem.reward.resolve import bind, resolve

logger = logging.getLogger(__name__)

_SLACK_S = 300.0  # beyond the scorings' own deadlines: processes that start, a machine that is busy


class Scoring(Protocol):
    """Where scorers run: ``ScoringPool`` has processes of their own for them, ``InlineScoring`` runs them here.

    Scoring comes in two halves, so that generation goes on in between::

        handles = [scoring.submit(group) for group in groups]
        scores = [scoring.collect(handle, deadline) for handle in handles]
    """

    def await_ready(self) -> None:
        """Wait until the first scoring can begin."""

    def submit(self, group: DataProto, label: str = "group") -> Handle:
        """Begin to score the samples of a group."""

    def collect(self, handle: Handle, deadline: Deadline) -> Scores:
        """Return the scores of a group."""

    def check(self) -> None:
        """Raise ``RewardError`` where nothing can be scored any more."""

    def activity(self) -> str:
        """Return who scores what, since when, in words."""

    def close(self) -> None:
        """End the processes that were started for scoring."""


class RewardManager:
    """Scores batches. Called with a batch it gives (B,) float32, NaN where scoring failed.

    ``submit`` and ``collect`` are the same in two halves, so that scoring goes on beside generation. ``components`` are
    the names of the K terms that each reward is the sum of, where the scorer has such. ``failures`` counts all
    scorings; what went wrong is warned of when it first happens and, with its count, at the end.
    """

    def __init__(
        self,
        scoring: Scoring,
        *,
        timeout_s: float = 30.0,
        on_error: Literal["mask", "refill", "stop"] = "mask",
        components: tuple[str, ...] = (),
    ) -> None:
        self.components = components
        self.failures = Failures()
        self._scoring = scoring
        self._timeout_s = timeout_s
        self._on_error = on_error

    def __call__(self, data: DataProto) -> torch.Tensor:
        scores, _ = self.collect(self.submit(data, "batch"))
        return torch.tensor(scores.rewards, dtype=torch.float32)

    def await_ready(self) -> None:
        """Wait until scoring can begin. Raises ``RewardError`` where the scorer can't be made, or doesn't start."""
        self._scoring.await_ready()

    def submit(self, group: DataProto, label: str, verdicts: Sequence[Verdict | None] = ()) -> Handle:
        """Begin to score ``group``; ``label`` names it in messages. The ``verdicts`` that are there already stay."""
        if verdicts and None not in verdicts:
            handle = Handle(label, len(group))
            handle.put(0, [verdict for verdict in verdicts if verdict is not None])
            return handle
        handle = self._scoring.submit(group, label)
        handle.know(verdicts)
        return handle

    def collect(self, handle: Handle) -> tuple[Scores, bool]:
        """Return the scores, and whether the group must be drawn anew.

        Raises ``RewardError`` where a scoring failed and ``on_error`` is ``stop``.
        """
        patience = self._timeout_s * max(1, len(handle)) + _SLACK_S
        scores = self._scoring.collect(handle, Deadline(patience))
        self.failures.add(scores)
        return scores, bool(apply_policy(scores, self._on_error).refill)

    def check(self) -> None:
        """Raise ``RewardError`` where nothing can be scored any more: who polls handles would wait in vain."""
        self._scoring.check()

    def activity(self) -> str:
        """Return who scores what, since when, in words."""
        return self._scoring.activity()

    def columns(self, scores: Scores) -> dict[str, torch.Tensor]:
        """Return ``rewards`` (B,) and ``reward_valid`` (B,), with ``reward_components`` (B, K) where there are such.

        NaN, and False, where a sample has no reward.
        """
        rewards = torch.tensor(scores.rewards, dtype=torch.float32)
        found = {"rewards": rewards, "reward_valid": rewards.isfinite()}
        if self.components:
            nothing = (math.nan,) * len(self.components)
            rows = [terms or nothing for terms in scores.components]
            found["reward_components"] = torch.tensor(rows, dtype=torch.float32).reshape(-1, len(self.components))
        return found

    def close(self) -> None:
        """End the scoring processes, and print what failed."""
        self._scoring.close()
        if self.failures.failed:
            logger.warning("rewards: %s", self.failures)


def build_reward_manager(
    config: RewardConfig | Config, *, tokenizer: Any = None, plugins: Sequence[str] = (), inline: bool = False
) -> RewardManager:
    """Return the scorer that ``config.reward_manager`` names.

    ``plugins`` are modules in which it may be defined, ``tokenizer`` is for scorers of whole batches; where not given,
    they are those of the config that the section belongs to. ``inline`` scores in this process, without the
    protection of deadlines. Raises ``ConfigError`` for an unknown type, a broken file, or wrong parameters. Example::

        config = load_config("run.yaml")
        reward_manager = build_reward_manager(config.reward_manager, tokenizer=tokenizer)
        rewards = reward_manager(rollout_outputs)  # (B,) float32, NaN where scoring failed
    """
    if isinstance(config, Config):
        config = config.reward_manager
    if not isinstance(config, RewardConfig):
        raise ContractError(f"build_reward_manager takes config.reward_manager, got {type(config).__name__}")
    root = config.root
    modules = plugins if plugins or root is None else root.plugins
    for name in modules:
        importlib.import_module(name)
    spec = resolve(config.type, config.file, config.parameters, modules)
    if tokenizer is None and spec.call.is_batch and root is not None:
        model = root.actor_rollout_ref.model
        tokenizer = load_tokenizer(model.tokenizer, trust_remote_code=model.trust_remote_code)
        set_template(tokenizer, root.data.chat_template, root.data.chat_template_kwargs)
    scoring: Scoring = (
        InlineScoring(bind(spec))
        if inline or config.type == NO_REWARD or _is_only_here(config)
        else ScoringPool(
            spec,
            workers=config.workers,
            deadline_s=config.timeout_s,
            start_s=config.start_s,
            tokenizer=tokenizer,
        )
    )
    components = component_names(config.type, config.file, config.parameters)
    return RewardManager(scoring, timeout_s=config.timeout_s, on_error=config.on_error, components=components)


def _is_only_here(config: RewardConfig) -> bool:
    """Return whether the scorer is an object of this program that no other process can import."""
    return config.file is None and config.type in REWARDS and bool(REWARDS[config.type].traits.get("here"))
