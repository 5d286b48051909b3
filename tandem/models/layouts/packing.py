"""Samples packed into one row of tokens, without padding and without computing a shared prompt twice.

A *document* is what attention sees as one sequence: the prompt of a sample followed by its answer. In the row, the
``n`` samples of a group share the tokens of their common prompt: these stand once, and ``n`` documents refer to them.
The last token of an answer predicts nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from tandem.base.errors import ContractError
from tandem.columns.images import Images
from tandem.columns.ragged import Ragged
from tandem.models.layouts.attention import AttentionLayout, Layout
from tandem.models.vision.images import Seen


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a row of tokens; all fields (B,) int64.

    Document i is ``row[prefix_start : prefix_start + prefix_length]`` followed by ``row[start : start + length]``.
    Several documents may share a prefix. Every token of the row belongs to a document.
    """

    prefix_start: torch.Tensor
    prefix_length: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor

    @classmethod
    def consecutive(cls, lengths: torch.Tensor) -> Documents:
        """Lay out documents of these ``lengths`` (B,) one after the other, nothing shared."""
        start = _starts(lengths)
        return cls(start, torch.zeros_like(lengths), start, lengths)

    @cached_property
    def totals(self) -> torch.Tensor:
        """Tokens that each document sees, (B,) int64."""
        return self.prefix_length + self.length

    def index(self, chosen: torch.Tensor, width: int) -> torch.Tensor:
        """Return the row positions of the tokens of the ``chosen`` documents, (b, width); padded with a document's own
        tokens.
        """
        column = torch.arange(width)[None, :].minimum(self.totals[chosen, None] - 1)
        prefix = self.prefix_length[chosen, None]
        inside = self.prefix_start[chosen, None] + column
        own = self.start[chosen, None] + column - prefix
        return torch.where(column < prefix, inside, own)


class PackedLayout(AttentionLayout):
    """Causal attention within each document of a packed row, never between documents.

    Documents of similar length form a bucket: its tokens are gathered to (b, width) and attended to at once. Right
    padding needs no mask under causality: no real token sees it, and what it yields is dropped. Documents of one
    length that lie side by side need no gathering.
    """

    def __init__(self, documents: Documents, device: torch.device | str = "cpu") -> None:
        totals = documents.totals
        if int(totals.min()) < 1:
            raise ContractError("a packed document has no token: leave empty samples out before packing")
        ends = torch.maximum(documents.start + documents.length, documents.prefix_start + documents.prefix_length)
        self.tokens = int(ends.max())
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._device = torch.device(device)
        self._width = int(totals.max())
        self._uniform = len(totals) * self._width == self.tokens and bool((totals == self._width).all())
        if not self._uniform:
            self._bucket(documents)

    @classmethod
    def of_lengths(cls, lengths: torch.Tensor, device: torch.device | str = "cpu") -> PackedLayout:
        """Lay out documents of these ``lengths`` (B,) int64, one after the other."""
        return cls(Documents.consecutive(lengths), device)

    def _bucket(self, documents: Documents) -> None:
        """Fill ``_shapes`` (b, width) per bucket, ``_gather`` (row -> buckets) and ``_scatter`` (buckets -> row)."""
        order = torch.argsort(documents.totals, descending=True, stable=True)
        self._shapes: list[tuple[int, int]] = []
        parts = []
        for first, last, width in _runs(documents.totals[order].tolist()):
            self._shapes.append((last - first, width))
            parts.append(documents.index(order[first:last], width).flatten())
        gather = torch.cat(parts)
        # A token may stand at several places: in each document of its prefix, and as padding. The first is a real one.
        places = torch.arange(len(gather))
        scatter = torch.full((self.tokens,), len(gather)).scatter_reduce(0, gather, places, "amin")
        self._gather, self._scatter = gather.to(self._device), scatter.to(self._device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attend inside each document: (1, H, T, D), (1, K, T, D) and (1, K, T, E) give (1, T, H, E)."""
        del layer
        heads, tokens, size = query.shape[1], query.shape[2], value.shape[3]
        if tokens != self.tokens:
            raise ContractError(f"{tokens} tokens came to a layout of {self.tokens}: build one layout per packed row")
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # (T, heads, D)
        if self._uniform:
            q, k, v = (x.unflatten(0, (-1, self._width)) for x in rows)
            return self._causal(q, k, v, scale, window).reshape(1, tokens, heads, size)
        gathered = [nn.functional.embedding(self._gather, x.flatten(1)) for x in rows]
        sizes = [count * width for count, width in self._shapes]
        outputs = []
        for shape, *parts in zip(self._shapes, *(x.split(sizes) for x in gathered), strict=True):
            q, k, v = (part.view(*shape, -1, x.shape[-1]) for part, x in zip(parts, rows, strict=True))
            outputs.append(self._causal(q, k, v, scale, window).flatten(0, 1).flatten(1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return nn.functional.embedding(self._scatter, joined).view(1, tokens, heads, size)

    def _causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attend causally: (b, L, H, D), (b, L, K, D) and (b, L, K, E) give (b, L, H, E)."""
        width = query.shape[1]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if window is not None and window < width and query.device.type != "cpu":
            return windowed_attention(query, key, value, scale, window).transpose(1, 2)
        if window is not None and window < width and (width, window) not in self._masks:
            self._masks[width, window] = banded(width, window, self._device)
        mask = self._masks.get((width, window)) if window is not None else None
        return causal_attention(query, key, value, scale, mask).transpose(1, 2)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend causally: (b, H, L, D), (b, K, S, D) and (b, K, S, E) give (b, H, L, E); L is S, or 1: the last. ``mask``
    (L, S) narrows.

    On CUDA a grouped product in float32, or beside a mask, has only the kernel that makes a table of (H, L, S) scores:
    keys and values are written out for each head then, which costs memory in L instead of its square.
    """
    groups = query.shape[1] // key.shape[1]
    narrow = query.dtype in (torch.bfloat16, torch.float16) and mask is None
    if groups > 1 and query.device.type != "cpu" and not narrow:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] == key.shape[2],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def windowed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Attend to the ``window`` latest positions, the token's own included: (b, H, L, D), (b, K, L, D) and (b, K, L, E)
    give (b, H, L, E).

    Queries stand in blocks of ``window``, and each block sees its own keys and those of the block before: one mask of
    (window, 2 · window) is enough for all, and nothing here or beneath grows with the square of L.
    """
    batch, length, count = query.shape[0], query.shape[2], -(-query.shape[2] // window)
    first = causal_attention(query[:, :, :window], key[:, :, :window], value[:, :, :window], scale, None)
    if count <= 1:
        return first
    query, key, value = (nn.functional.pad(x, (0, 0, 0, count * window - length)) for x in (query, key, value))
    blocks = query[:, :, window:].unflatten(2, (-1, window)).transpose(1, 2).flatten(0, 1)  # (b · n, H, window, D)
    keys, values = (
        x.unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3).flatten(0, 1)  # (b · n, K, 2 · window, D)
        for x in (key, value)
    )
    own, seen = torch.arange(window, device=query.device)[:, None], torch.arange(2 * window, device=query.device)
    others = causal_attention(blocks, keys, values, scale, (seen > own) & (seen <= own + window))
    behind = others.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, behind[:, :, : length - window]], 2)


def banded(width: int, window: int, device: torch.device) -> torch.Tensor:
    """Return (width, width) bool: the ``window`` latest positions, the token's own included."""
    position = torch.arange(width, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


@dataclass(frozen=True)
class PackedSamples:
    """B samples as one row of T tokens, and where the log-probs of their N trained tokens are read.

    ``input_ids``, ``positions`` (T,) int64; positions are (3, T) where some sample shows ``images``, whose tokens are
    marked. Trained token m has its logits at row position ``read[m]``, is
    ``targets[m]``, and belongs at place ``slots[m]`` of the flattened (B, width) answers; all (N,) int64.

    ``stretch`` (T,) int64 on the CPU: 2 i for tokens of the prompt that stand with sample i, 2 i + 1 for those of its
    answer; ``lead`` (B,) the sample with which the prompt of each stands. ``routes`` (T, w) uint8 of the tokens.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    layout: Layout
    read: torch.Tensor
    targets: torch.Tensor
    slots: torch.Tensor
    samples: int
    width: int
    stretch: torch.Tensor
    lead: torch.Tensor
    images: Images | None = None
    routes: torch.Tensor | None = None

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Put values of the trained tokens (N, ...) at their places in (B, width, ...), 0 elsewhere; differentiable."""
        total, trailing = self.samples * self.width, values.shape[1:]
        if len(values) != total:
            values = values.new_zeros(total, *trailing).index_copy(0, self.slots, values)
        return values.view(self.samples, self.width, *trailing)

    def chosen(self, padded: torch.Tensor) -> torch.Tensor:
        """Return the trained tokens' part (N, ...) of (B, width, ...): what ``padded`` was made of."""
        return padded.flatten(0, 1)[self.slots]


def pack_samples(
    prompts: Ragged,
    responses: Ragged,
    response_mask: Ragged,
    *,
    restarts: Ragged | None = None,
    share_prompts: bool = True,
    device: torch.device | str = "cpu",
    layout: Callable[[Documents, torch.device | str], Layout] = PackedLayout,
    seen: Seen | None = None,
    routes: tuple[Ragged, Ragged] | None = None,
) -> PackedSamples:
    """Pack B samples given on the CPU; ``response_mask`` (bool) says which tokens of ``responses`` get a log-prob.

    Neighbouring samples with equal prompts share them (found by comparing tokens), unless ``share_prompts`` is off.
    ``restarts`` (bool, as ``response_mask``): True on tokens, none of them trained, with which a document of its own
    begins. ``layout`` makes of the documents what the model runs by. ``seen``: the prompts as a model sees them, where
    they show images: those that differ in an image only are not equal. ``routes``: records of the tokens of prompts and
    of responses, (N, w) uint8 each; a shared prompt has those of the first sample that it stands with.
    Raises ``ContractError`` for an empty prompt, whose answer would have nothing to be predicted from.
    """
    prompts = prompts if seen is None else seen.prompts
    given, answered = prompts.lengths, responses.lengths
    _refuse_empty(given)
    leads = _leads(prompts) if share_prompts else torch.ones_like(given, dtype=torch.bool)
    own = (answered - 1).clamp(min=0)
    here = torch.where(leads, given, 0)  # prompt tokens that stand in the row at this sample
    start = _starts(here + own)
    lead = leads.nonzero()[:, 0][leads.cumsum(0) - 1]
    prefix_start = start[lead]
    documents = Documents(prefix_start, given, start + here, own)

    sample, offset = _unravel(here + own)
    in_prompt = offset < here[sample]
    answer_offset = offset - here[sample]
    source = torch.where(
        in_prompt, prompts.offsets[sample] + offset, len(prompts.values) + responses.offsets[sample] + answer_offset
    )
    positions = torch.where(in_prompt, offset, given[sample] + answer_offset)
    if restarts is not None and bool(restarts.values.any()):
        documents = _begun_anew(documents, restarts, positions)
    stretch = 2 * sample + ~in_prompt
    recorded = None if routes is None else torch.cat([part.values for part in routes])[source]
    positions = positions if seen is None else seen.placed(sample, torch.where(in_prompt, offset, -1), positions)

    read, targets, slots = _trained(responses, response_mask, prefix_start + given - 1, start + here - 1)
    return PackedSamples(
        input_ids=torch.cat([prompts.values, responses.values])[source].to(device),
        positions=positions.to(device),
        layout=layout(documents, device),
        read=read.to(device),
        targets=targets.to(device),
        slots=slots.to(device),
        samples=len(own),
        width=int(answered.max()),
        stretch=stretch,
        lead=lead,
        routes=None if recorded is None else recorded.to(device),
        images=None if seen is None else seen.images,
    )


def _trained(
    responses: Ragged, response_mask: Ragged, last_of_prompt: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of the N trained tokens where their logits are in the row, their ids, and their places among the answers
    (B, width), (N,) each.

    ``last_of_prompt`` (B,) are places in the row, ``before`` (B,) the places before the answers.
    """
    sample, offset = _unravel(responses.lengths)
    read = torch.where(offset == 0, last_of_prompt[sample], before[sample] + offset)
    slots = sample * int(responses.lengths.max()) + offset
    targets, trained = responses.values, response_mask.values
    if not bool(trained.all()):
        read, slots, targets = read[trained], slots[trained], targets[trained]
    return read, targets, slots


def _refuse_empty(lengths: torch.Tensor) -> None:
    empty = torch.nonzero(lengths == 0)
    if len(empty):
        raise ContractError(f"sample {int(empty[0])} has an empty prompt: give it at least one token, such as BOS")


def _begun_anew(documents: Documents, restarts: Ragged, positions: torch.Tensor) -> Documents:
    """Return the documents in the order of the row, each ending where another begins in the same sample.

    ``positions`` (T,) are counted anew there, in place.
    """
    owner, offset = _unravel(restarts.lengths)
    chosen = restarts.values & (offset < documents.length[owner])  # the last token of an answer is not in the row
    if not bool(chosen.any()):
        return documents
    owner, offset = owner[chosen], offset[chosen]
    other = owner[1:] != owner[:-1]
    first, last = nn.functional.pad(other, (1, 0), value=True), nn.functional.pad(other, (0, 1), value=True)
    length = torch.where(last, documents.length[owner], nn.functional.pad(offset[1:], (0, 1))) - offset
    start = documents.start[owner] + offset
    kept = documents.length.index_copy(0, owner[first], offset[first])
    inside, place = _unravel(length)
    positions[start[inside] + place] = place
    starts = torch.cat([documents.start, start])
    order = torch.argsort(starts, stable=True)
    return Documents(
        torch.cat([documents.prefix_start, start])[order],
        torch.cat([documents.prefix_length, torch.zeros_like(start)])[order],
        starts[order],
        torch.cat([kept, length])[order],
    )


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Return where each of several stretches of these lengths starts, laid end to end."""
    return lengths.cumsum(0) - lengths


def _unravel(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each of sum(lengths) tokens the row that it is in, and its place in that row."""
    row = torch.repeat_interleave(lengths)
    return row, torch.arange(len(row)) - _starts(lengths)[row]


def _leads(rows: Ragged) -> torch.Tensor:
    """Return (B,) bool: False where a row equals the one before it."""
    lengths, count = rows.lengths, len(rows)
    row, offset = _unravel(lengths)
    leads = torch.ones(count, dtype=torch.bool)
    leads[1:] = lengths[1:] != lengths[:-1]
    before = (rows.offsets[(row - 1).clamp(min=0)] + offset).clamp(max=max(len(row) - 1, 0))
    differs = torch.bincount(row[rows.values != rows.values[before]], minlength=count) > 0
    leads |= differs
    leads[0] = True
    return leads


def _runs(lengths: list[int]) -> list[tuple[int, int, int]]:
    """Return (first, last + 1, width) of runs of falling ``lengths``; they are padded by at most 8 tokens or an
    eighth.
    """
    runs: list[tuple[int, int, int]] = []
    first = 0
    for i, length in enumerate(lengths):
        width = lengths[first]
        if width - length > max(8, width // 8):
            runs.append((first, i, width))
            first = i
    runs.append((first, len(lengths), lengths[first]))
    return runs
