"""Drawing one token per row: a counter-based random stream for each seed, inversion of the distribution function."""

from __future__ import annotations

import torch

from tandem.rollout.protocol import Sampling

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_BLOCK = 256  # tokens whose probabilities are summed first; the draw then needs no running sum over the vocabulary
_HEAD = 1024  # tokens among which top-p is first looked for


def uniforms(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return the ``counters``-th number of each seed's stream, both (R,) int64 -> (R,) float64 in (0, 1).

    SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), jumped to by the counter:
    a number depends on nothing but its seed and counter. Seeds are mixed first, so that near seeds have far streams.
    """
    bits = _mix(_mix(seeds) + (counters + 1) * _GOLDEN)
    return (_shift(bits, 11).to(torch.float64) + 0.5) * 2.0**-53


def draw(
    logits: torch.Tensor,
    sampling: Sampling,
    uniform: torch.Tensor,
    owner: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each of R uniform numbers: tokens (R,) int64 and their log-probs (R,) float32.

    ``logits`` (G, V) of any float dtype (half types are raised to float32); row i draws from ``logits[owner[i]]``, or
    from ``logits[i]`` without ``owner`` (R,) int64. Rows of which ``greedy`` (R,) bool holds take the likeliest token,
    as all do under ``sampling.greedy``. See ``Sampling`` for the distribution. A row that holds none (NaN,
    or +inf) gives the log-prob NaN.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    owner = torch.arange(len(uniform), device=logits.device) if owner is None else owner
    if sampling.greedy:
        return _likeliest(logits, owner)
    if greedy is not None:
        drawn, likeliest = draw(logits, sampling, uniform, owner), _likeliest(logits, owner)
        tokens, logprobs = (torch.where(greedy, best, one) for best, one in zip(likeliest, drawn, strict=True))
        return tokens, logprobs
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    full = kept = logits.softmax(-1)
    if 0 < sampling.top_k < full.shape[1]:
        kept = _keep_likeliest(kept, sampling.top_k)
    if sampling.top_p < 1.0:
        kept = _keep_nucleus(kept, sampling.top_p)
    tokens, total = _invert(kept, uniform, owner)
    probs = full[owner, tokens].double()
    return tokens, (probs if sampling.logprobs_of == "full" else probs / total).log().float()


def _likeliest(logits: torch.Tensor, owner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest token of each row and its log-prob at temperature 1."""
    tokens = logits.argmax(-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens[owner], logprobs[owner].float()


def _invert(probs: torch.Tensor, uniform: torch.Tensor, owner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token at which the running sum of ``probs`` (G, V) passes the share ``uniform`` (R,) of its total.

    Returns tokens (R,) int64 and the totals (R,) float64, which are below 1 where tokens were cut off.
    """
    vocabulary = probs.shape[1]
    block = min(_BLOCK, vocabulary)
    if vocabulary % block:
        probs = torch.nn.functional.pad(probs, (0, block - vocabulary % block))
    blocks = probs.unflatten(1, (-1, block))  # (G, V / 256, 256)
    reached = blocks.sum(-1).cumsum(-1, dtype=torch.float64)[owner]  # (R, V / 256)
    total = reached[:, -1:]
    target = uniform[:, None] * total
    chosen, before = _passing(reached, target)
    inside = blocks[owner, chosen].cumsum(-1, dtype=torch.float64)  # (R, 256)
    place, _ = _passing(inside, target - before)
    return chosen * block + place, total[:, 0]


def _passing(running: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first place (R,) at which ``running`` (R, C) exceeds ``target`` (R, 1), and the running sum (R, 1)
    before it.

    Where rounding leaves the target at or above the last sum, the last place that adds anything is taken, so a token
    of probability 0 is never drawn.
    """
    place = torch.searchsorted(running, target, right=True).minimum(running.argmax(-1, keepdim=True))
    before = torch.where(place > 0, running.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place[:, 0], before


def _keep_likeliest(probs: torch.Tensor, k: int) -> torch.Tensor:
    """Zero all but the ``k`` likeliest tokens of each row."""
    values, tokens = probs.topk(k, dim=-1)
    return torch.zeros_like(probs).scatter_(-1, tokens, values)


def _keep_nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the fewest tokens that together have at least ``top_p`` of the row's total.

    The likeliest tokens are looked at first, since sorting a whole vocabulary costs more than a model's step.
    """
    mass = top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    count = min(_HEAD, probs.shape[1])
    values, tokens = probs.topk(count, dim=-1)
    reached = values.cumsum(-1, dtype=torch.float64)
    if bool((reached[:, -1:] < mass).any()):
        values, tokens = probs.sort(dim=-1, descending=True, stable=True)
        reached = values.cumsum(-1, dtype=torch.float64)
    inside = reached - values < mass
    return torch.zeros_like(probs).scatter_(-1, tokens, values * inside)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return the finaliser of SplitMix64 on int64, whose products wrap around."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the right shift without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
