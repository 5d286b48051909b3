"""The advantages role: rewards become one advantage per token, once, over the whole partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from tandem.algorithms.advantage import ADVANTAGES, Advantages
from tandem.algorithms.kl import KL_CONTROLLERS, KLController, kl_in_reward
from tandem.base.errors import ContractError
from tandem.base.registry import Signature
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.schema import AlgorithmConfig, KlConfig


def token_rewards(rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Lay scores (B,) on the last trained token of each answer: (B, T), 0 elsewhere.

    A sample without a trained token has no place for a reward and gets none; a score that is not finite (a failed
    scoring) counts as none.
    """
    rewards = torch.where(rewards.isfinite(), rewards, 0.0)
    places = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, places, -1).amax(dim=1) if response_mask.shape[1] else None
    if last is None:
        return torch.zeros(response_mask.shape)
    return torch.where(places == last[:, None], rewards[:, None], 0.0)


def kl_controller(kl: KlConfig) -> KLController:
    """Return the controller that the config names."""
    make = KL_CONTROLLERS[kl.controller].target
    if kl.controller == "adaptive":
        return make(coef=kl.coef, target=kl.target, horizon=kl.horizon)
    return make(coef=kl.coef)


@dataclass(frozen=True)
class AdvantageReport:
    """A report of one partition: ``metrics``, and the ``state`` in which its KL left the controller."""

    metrics: dict[str, float]
    state: dict[str, float]


@dataclass
class AdvantageStage:
    """Estimator, KL in the reward and its controller.

    ``kl`` is None where no KL is taken from the reward; its coefficient is constant within a partition and learns from
    partition k for k + 1. ``added``: the batch brings ``token_rewards`` of a stage (a process reward). The estimator
    sees them plus the reward of the answer on its last trained token; the column stays as it was given.
    """

    estimate: Callable[..., Advantages]
    signature: Signature
    kl: KlConfig | None = None
    controller: KLController | None = None
    added: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, *, added: bool = False) -> AdvantageStage:
        """Return the stage that the config describes."""
        written = algorithm.adv_estimator
        name, parameters = (written, {}) if isinstance(written, str) else (written.type, written.parameters)
        entry = ADVANTAGES[name]
        in_reward = algorithm.kl.where == "reward" and algorithm.kl.coef > 0
        kl = algorithm.kl if in_reward else None
        controller = kl_controller(algorithm.kl) if in_reward else None
        return cls(partial(entry.target, **parameters), entry.signature, kl, controller, added)

    def __call__(self, batch: DataProto) -> DataProto:
        """Return the batch with ``token_rewards`` (unless it brings some), ``advantages`` and ``returns``.

        Raises ``ContractError`` where a trained token has a reward that is no number.
        """
        layout = batch.ragged("response_mask")
        mask = batch.padded("response_mask", False).bool()
        rewards = token_rewards(batch.dense("rewards"), mask)
        self.metrics = {}
        if self.added:
            rewards = rewards + self._brought(batch, mask)
        if self.kl is not None and self.controller is not None:
            rewards = self._penalised(batch, rewards, mask)
        padded = {"token_rewards": rewards, "response_mask": mask}
        advantages, returns = self.estimate(**self._columns(batch, padded))
        made = {"advantages": advantages, "returns": returns}
        if not self.added:
            made["token_rewards"] = rewards
        inside = layout.mask()
        columns = {name: layout.like(values[inside].float()) for name, values in made.items()}
        return DataProto({**batch.batch, **columns}, batch.non_tensor_batch, batch.meta_info, batch.tokenizer)

    def _brought(self, batch: DataProto, mask: torch.Tensor) -> torch.Tensor:
        """Return the rewards at tokens that a stage gave, (B, T), 0 outside ``mask``."""
        given = batch.padded("token_rewards")
        broken = (mask & ~given.isfinite()).any(dim=-1)
        if bool(broken.any()):
            raise ContractError(
                f"token_rewards of {int(broken.sum())} of {len(batch)} samples are no numbers, the first in row "
                f"{int(broken.nonzero()[0])}: a stage gives 0 where it has nothing to say"
            )
        brought = torch.where(mask, given, 0.0)
        sums = brought.double().sum(dim=-1)[mask.any(dim=-1)]
        self.metrics["reward/tokens"] = float(sums.mean()) if len(sums) else 0.0
        return brought

    def _penalised(self, batch: DataProto, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert self.kl is not None and self.controller is not None
        penalised = kl_in_reward(
            rewards,
            batch.padded("old_logprobs"),
            batch.padded("ref_logprobs"),
            mask,
            kind=self.kl.type,
            coef=self.controller.coef,
        )
        self.metrics |= {"kl/reward": penalised.kl.mean, "kl/coef": self.controller.coef}
        self.controller.update(penalised.kl.mean, len(batch))
        return penalised.token_rewards

    def _columns(self, batch: DataProto, padded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the estimator's columns by name, ragged ones padded (B, T)."""
        wanted = (*self.signature.columns, *self.signature.optional_columns)
        chosen: dict[str, torch.Tensor] = {}
        for name in wanted:
            if name in padded:
                chosen[name] = padded[name]
            elif name in batch.batch:
                column = batch.batch[name]
                chosen[name] = column.padded() if isinstance(column, Ragged) else column
            elif name in self.signature.columns:
                raise ContractError(f"the advantage estimator needs column {name!r}; the batch has {batch.columns}")
        return chosen

    def report(self) -> AdvantageReport:
        """Return the metrics and the controller's state after the last partition."""
        return AdvantageReport(dict(self.metrics), dict(self.state_dict()))

    def state_dict(self) -> dict[str, float]:
        """Return the state of the KL controller; empty where there is none."""
        return {} if self.controller is None else self.controller.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with a saved controller."""
        if self.controller is not None and state:
            self.controller.load_state_dict(state)
