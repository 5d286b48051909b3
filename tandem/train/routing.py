"""What the routers of a mixture of experts did with the samples of a step: loads, and how evenly each sample is spread.

All counts are of samples: a prompt that several samples share counts for each of them, so that nothing depends on how
they were packed, cut into micro-batches, or dealt to ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tandem.models.layouts.packing import PackedSamples
from tandem.models.routers import Choice, Routers

BALANCE = "router_balance"
"""The column (b,) that objectives with a ``router_coef`` get: how unevenly each sample is spread over the experts."""

_MORE = 6  # sums beside the counts


@dataclass(frozen=True)
class Routing:
    """Sums over samples, which add up over micro-batches and ranks.

    ``sums`` (L · E + 6,): of each layer the routes to each expert; then entropies of routers, tokens, balances of
    samples, samples, routes that were replayed against the router's own choice, tokens that were replayed. Entropies,
    tokens and the last two are of all layers together.
    """

    layers: int
    experts: int
    sums: torch.Tensor
    replays: bool = False
    """Whether routes were given."""

    def __add__(self, other: Routing) -> Routing:
        return Routing(self.layers, self.experts, self.sums + other.sums, self.replays or other.replays)

    def cpu(self) -> Routing:
        """Return the same on the CPU: the one copy of a step."""
        return replace(self, sums=self.sums.cpu())

    def metrics(self) -> dict[str, float]:
        """Return what is reported of a step."""
        values = self.sums.double()
        counts = values[:-_MORE].view(self.layers, self.experts)
        entropy, tokens, balance, samples, otherwise, given = values[-_MORE:].tolist()
        loads = counts / counts.sum(1, keepdim=True).clamp(min=1.0) * self.experts  # 1 is an even share
        chosen = float(counts.sum()) / max(tokens, 1.0)
        found = {
            "moe/load_max": float(loads.max()),
            "moe/load_max_mean": float(loads.max(1).values.mean()),
            "moe/load_min": float(loads.min()),
            "moe/unused": float((counts == 0).double().mean()),
            "moe/entropy": entropy / max(tokens, 1.0),
            "moe/balance": balance / max(samples, 1.0),
        }
        if self.replays:
            found["moe/replayed_otherwise"] = otherwise / max(given * chosen, 1.0)
            found["moe/not_recorded"] = 1.0 - given / max(tokens, 1.0)
        return found


def observed(routers: Routers, choices: Sequence[Choice], samples: PackedSamples) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the balance of each sample (B,), with gradient, and the ``sums`` of a ``Routing`` without.

    The balance of a sample of T tokens is E / (k T²) · Σ_i n_i p_i, the mean over layers: n_i are the tokens of it that
    went to expert i, p_i the sum of the probabilities that its tokens gave it. That is the sequence-wise balance loss
    of DeepSeek-V3 (arXiv 2412.19437, eq. 17 to 20, with alpha = 1) and the loss of the Switch Transformer (arXiv
    2101.03961, eq. 4 to 6) of one sequence: 1 where all experts are alike.
    """
    device, count = choices[0].logits.device, len(samples.lead)
    lead, stretch = samples.lead, samples.stretch
    uses = torch.stack([torch.bincount(lead, minlength=count), torch.ones_like(lead)], 1).flatten()
    weight = uses[stretch].to(device)  # (T,): of how many samples a token is
    lengths = torch.bincount(stretch, minlength=2 * count)
    lengths = (lengths[1::2] + lengths[::2][lead]).to(device)
    stretch, lead = stretch.to(device), lead.to(device)

    def of_samples(rows: torch.Tensor) -> torch.Tensor:
        """Return the sums of rows (T, E) over the tokens of each sample, (B, E)."""
        parts = rows.new_zeros(2 * count, rows.shape[1]).index_add(0, stretch, rows)
        return parts[1::2] + parts[::2][lead]

    balance: torch.Tensor | float = 0.0
    counted, entropy = [], torch.zeros((), device=device)
    for choice in choices:
        probabilities = routers.probabilities(choice.logits)
        ones = torch.zeros_like(probabilities).scatter(1, choice.experts, 1.0)
        chosen = of_samples(ones)
        shares = (chosen * of_samples(probabilities)).sum(1) / (lengths * lengths)
        balance = balance + shares * (routers.experts / (routers.chosen * routers.layers))
        counted.append(chosen.sum(0))
        with torch.no_grad():
            entropy = entropy + (torch.special.entr(probabilities).sum(1) * weight).sum()
    assert isinstance(balance, torch.Tensor)
    with torch.no_grad():
        tokens = (weight.sum() * len(choices)).float()
        replayed = [choice for choice in choices if choice.otherwise is not None and choice.given is not None]
        otherwise = sum((c.otherwise * weight).sum() for c in replayed if c.otherwise is not None)
        given = sum((c.given * weight).sum() for c in replayed if c.given is not None)
        ends = [entropy, tokens, balance.sum(), count, otherwise, given]
        last = torch.stack([torch.as_tensor(one, device=device, dtype=torch.float32) for one in ends])
        sums = torch.cat([*(one.float() for one in counted), last])
    return balance, sums
