"""One optimizer step of plain PyTorch: clip, schedule, and a skip where the gradient is not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tandem.config.model import OptimConfig
from tandem.train.protocol import StepResult
from tandem.train.schedule import lr_factor


class Updater:
    """AdamW over ``parameters`` for loops that make their own gradients; ``total_updates`` is where a schedule ends."""

    def __init__(self, parameters: Iterable[nn.Parameter], optim: OptimConfig, total_updates: int) -> None:
        self.updates = self.skipped = 0
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optim, self._total = optim, total_updates
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )

    def step(self) -> StepResult:
        """Apply the gradients and clear them. A step with a gradient that is not finite changes nothing but a count."""
        optim = self._optim
        norm = nn.utils.clip_grad_norm_(self._parameters, optim.grad_clip)
        factor = lr_factor(
            optim.schedule,
            self.updates,
            warmup_steps=optim.warmup_steps,
            total_steps=self._total,
            min_ratio=optim.min_lr_ratio,
        )
        applied = bool(norm.isfinite())
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = optim.lr * factor
            self._optimizer.step()
            self.updates += 1
        else:
            self.skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(applied, float(norm), optim.lr * factor, self.updates, self.skipped)
