"""From accumulated gradients to an optimizer step: divide, clip, schedule, and skip what must not be applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tandem.config.model import OptimConfig
from tandem.train.protocol import StepResult
from tandem.train.schedule import lr_factor
from tandem.train.sharding import is_first_copy, local_shard, shard_like


class Updater:
    """AdamW over the trained ones of ``parameters``, which may be sharded over ranks: those that the sums over
    ``groups``, one after the other, take together.

    ``counted`` says of a plain one whether this rank's gradient of it is one of those that the sum takes: others have
    the same. ``total_updates`` is where a falling schedule ends. ``updates`` and ``skipped`` count the steps so far.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optim: OptimConfig,
        total_updates: int,
        *,
        groups: Sequence[dist.ProcessGroup] = (),
        counted: Callable[[nn.Parameter], bool] = lambda parameter: True,
    ) -> None:
        self.updates = self.skipped = 0
        self._parked = False
        self._buffer: torch.Tensor | None = None  # where moments are while they are parked
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optim, self._total_updates, self._groups, self._counted = optim, total_updates, groups, counted
        self.optimizer = torch.optim.AdamW(
            _decay_groups(self._parameters, optim.weight_decay),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            fused=True,
        )

    def step(self, denominator: float = 1.0) -> StepResult:
        """Divide the gradients by ``denominator``, clip and apply them, and clear them; see ``StepResult``."""
        found = [(p, p.grad) for p in self._parameters if p.grad is not None]
        grads = [local_shard(grad) for _, grad in found]
        own = [local_shard(grad) for p, grad in found if is_first_copy(grad) and self._counted(p)]
        norm = self._norm(own) / denominator
        lr = self._learning_rate()
        # A gradient of zero everywhere means that nothing was trained: old moments must not move the weights then.
        applied = bool(torch.isfinite(norm)) and bool(norm > 0)
        if applied:
            clip = (self._optim.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, float(clip / denominator))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.updates += 1
        else:
            self.skipped += 1
        self.clear()
        return StepResult(applied, float(norm), lr, self.updates, self.skipped)

    def clear(self) -> None:
        """Let the gradients go, and their memory with them."""
        self.optimizer.zero_grad(set_to_none=True)

    def as_configured(self) -> None:
        """Give the optimizer the numbers of this run's config again, after it was loaded with those of a saved one."""
        matrices = {id(p) for p in self._parameters if p.ndim > 1}
        for group in self.optimizer.param_groups:
            decays = any(id(p) in matrices for p in group["params"])
            group["weight_decay"] = self._optim.weight_decay if decays else 0.0
            group["betas"], group["eps"], group["lr"] = self._optim.betas, self._optim.eps, self._optim.lr

    def park_moments(self) -> None:
        """Move the moment estimates to the host: into one buffer, pinned for CUDA, which is kept for the next time."""
        held = [
            (state, name, local_shard(value))
            for state in self.optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        ]
        if self._parked or not held:
            return
        places = list(accumulate((_aligned(local.nbytes) for _, _, local in held), initial=0))
        if self._buffer is None or len(self._buffer) < places[-1]:
            pinned = held[0][2].device.type == "cuda"
            self._buffer = torch.empty(places[-1], dtype=torch.uint8, pin_memory=pinned)
        for (state, name, local), start in zip(held, places, strict=False):
            part = self._buffer[start : start + local.nbytes].view(local.dtype).view(local.shape)
            state[name] = part.copy_(local)
        self._parked = True

    def fetch_moments(self, device: torch.device) -> None:
        """Move the moment estimates that are parked to ``device``."""
        if not self._parked:
            return
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[name] = shard_like(parameter, value.to(device, non_blocking=True))
        self._parked = False

    def _learning_rate(self) -> float:
        optim = self._optim
        factor = lr_factor(
            optim.schedule,
            self.updates,
            warmup_steps=optim.warmup_steps,
            total_steps=self._total_updates,
            min_ratio=optim.min_lr_ratio,
            cycles=optim.num_cycles,
        )
        return optim.lr * factor

    def _norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Return the 2-norm over all shards of all ranks, float64 on the CPU; finite exactly if all gradients are."""
        norms = torch._foreach_norm(grads)
        squares = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
        squares = squares.to(self._parameters[0].device)
        for group in self._groups:
            dist.all_reduce(squares, group=group)
        return squares.sqrt().cpu()


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Put weight decay on matrices only: norms and biases are vectors."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _aligned(size: int) -> int:
    """Return ``size`` bytes rounded up, so that what comes next can be a tensor of any dtype."""
    return -(-size // 16) * 16
