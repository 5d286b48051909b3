"""Proof that a model, as Tandem runs it, gives what plain transformers gives: a few tokens through each route.

Routes are tried from the fastest to the slowest, and the first that is equal is taken. No name is trusted: packed rows
are wrong for models that mix tokens outside of attention, shared prompts and caches for those with state of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Literal

import torch

from tandem.base.errors import DataError, sentences
from tandem.columns.images import Images
from tandem.columns.ragged import Ragged
from tandem.models.causal_lm import ROUTES, CausalLM, Route, quiet
from tandem.models.families import BORDERS, PER_DOCUMENT
from tandem.models.head.projection import Head
from tandem.models.layouts.attention import watched
from tandem.models.layouts.kv_store import closing
from tandem.models.layouts.packing import pack_samples
from tandem.models.layouts.row_cache import Placed, RowCache
from tandem.models.lora import adapted_layers, adapters_off
from tandem.models.prefill import Prompts

Use = Literal["training", "generation"]

logger = logging.getLogger(__name__)

_FULL, _HALF = 1e-3, 0.2
"""Largest difference of hidden states, in units of their spread: with float32 weights, with some in half precision."""


@dataclass(frozen=True)
class Probe:
    """What is run: groups of a prompt and answers. All are short, and differ: that shows each kind of mixing.

    ``prompts`` are tokens of each prompt, ``answers`` of each answer to it; each prompt has equally many, of 2 tokens
    or more. ``compared`` (prompt, answer): the documents that a plain model runs too, at the cost of a forward for each
    length. Those in the middle have neighbours on both sides, and one of them goes on when others have ended.
    """

    prompts: tuple[int, ...] = (4, 3)
    answers: tuple[tuple[int, ...], ...] = ((3, 2), (3, 2))
    compared: tuple[tuple[int, int], ...] = ((0, 1), (1, 0))


def prove(
    model: CausalLM, use: Use, probe: Probe = Probe(), *, known: Mapping[str, str] = PER_DOCUMENT
) -> dict[Route, str]:
    """Have ``model`` take the fastest route that is right for ``use``, and for what it was proved for before.

    Gives why the faster ones are not. Families that are ``known`` to need a row per document get one. Raises
    ``DataError`` naming the family where no route is right.
    """
    if use in model.proved:
        return {}
    proved, taken = model.proved, model.route
    fixed = not proved and taken == "rows"
    reasons: dict[Route, str] = {"packed": "its attention can't be replaced"} if fixed else {}
    with _undisturbed(model):
        for route in ROUTES[ROUTES.index(taken) :]:
            uses = {use} if route == taken else {use, *proved}  # on the route it has it is proved for the others
            reason = _known(model, route, known) or _difference(model, route, uses, probe)
            if reason is None:
                model.proved = proved | {use}
                _say(model, reasons)
                return reasons
            reasons[route] = reason
    tried = "; ".join(f"{route}: {reason}" for route, reason in reasons.items())
    raise DataError(
        f"the model family {model.family!r} can't be used for {use}: no way of running it gives what plain "
        f"transformers gives ({tried}). Choose another model; docs/models.md lists what works"
    )


def _say(model: CausalLM, reasons: Mapping[Route, str]) -> None:
    if model.route == "packed":
        return
    rows = "a row per document" if model.route == "rows" else "in one row, prompts not shared"
    cache = "without a cache, each token anew" if model.recomputes else "with its own cache"
    logger.warning(
        "the model family %r runs %s and generates %s, which is right and slower (%s)",
        model.family,
        rows,
        cache,
        reasons.get("packed"),
    )


def _known(model: CausalLM, route: Route, known: Mapping[str, str]) -> str | None:
    """Return why the family can't take ``route``, whatever a few tokens show."""
    families = {model.family, model.model.config.get_text_config().model_type}
    if route == "rows" or (route == "bordered" and families & BORDERS):
        return None
    return next((known[family] for family in families if family in known), None)


def _difference(model: CausalLM, route: Route, uses: set[Use], probe: Probe) -> str | None:
    """Return why ``model`` can't take ``route``; None where it has taken it, and can.

    Nothing generates with adapters off.
    """
    if not adapted_layers(model):
        return _differs(model, route, uses, probe)
    with _stirred(model):
        reason = _differs(model, route, uses, probe)
    if reason is None and "training" in uses:
        with adapters_off(model):
            reason = _differs(model, route, {"training"}, probe)
    return reason


def _differs(model: CausalLM, route: Route, uses: set[Use], probe: Probe) -> str | None:
    checks: dict[Use, _Check] = {"training": _trained, "generation": _generated}
    model.take("rows")
    reference = _Reference(model, probe)
    model.take(route)
    if model.route != route:
        return "its attention can't be replaced"
    with watched() as seen:
        reason = next((found for use in sorted(uses) if (found := _tried(checks[use], model, reference))), None)
    if reason is None and route != "rows" and seen.masks - {None} != seen.layers - {None}:
        return f"windows of its masks are {seen.masks - {None}}, of its attention {seen.layers - {None}}"
    return reason


class _Reference:
    """Documents, and what the plain model gives for some: states (L, d), which its head must know how to read.

    Those of one length run side by side, as rows without padding. Nothing comes after the last token of an answer, so
    no document has it.
    """

    def __init__(self, model: CausalLM, probe: Probe) -> None:
        self._model, tokens = model, ordinary_tokens(model)
        self._tolerance = _HALF if _rounded(model) else _FULL
        self.prompts = [next_tokens(tokens, length) for length in probe.prompts]
        self.shown: list[Images | None] = [None for _ in self.prompts]
        if model.vision is not None:  # the first one shows an image, between its first token and the others
            self.shown[0] = model.vision.smallest(model.model)
            self.prompts[0][1:3] = model.vision.image_token
        self.answers = [[next_tokens(tokens, length) for length in row] for row in probe.answers]
        self._states: dict[tuple[int, int], torch.Tensor] = {}
        documents = {(p, a): torch.cat([self.prompts[p], self.answers[p][a][:-1]]) for p, a in probe.compared}
        for length in dict.fromkeys(map(len, documents.values())):
            rows = {at: ids for at, ids in documents.items() if len(ids) == length}
            shown = [images for p, _ in rows if (images := self.shown[p]) is not None]
            states = self._plain(torch.stack(list(rows.values())), shown)
            self._states |= zip(rows, states, strict=True)

    def differs(self, states: torch.Tensor, at: list[tuple[int, int, int]], what: str) -> str | None:
        """Return whether ``states`` (N, d) are others than those of (prompt, answer, tokens behind it): then says so.

        Those of documents that the plain model did not run are not asked after.
        """
        known = [i for i, (p, a, _) in enumerate(at) if (p, a) in self._states]
        if not known:
            return None
        expected = [self._states[p, a][len(self.prompts[p]) - 1 + done] for p, a, done in (at[i] for i in known)]
        return self._unequal(states[known], torch.stack(expected), what)

    def _plain(self, ids: torch.Tensor, shown: list[Images]) -> torch.Tensor:
        """Return plain states (B, L, d) of ``ids`` (B, L), which show these images."""
        model, found = self._model, list[torch.Tensor]()
        ids, images = ids.to(model.model.device), {}
        if shown:
            joined, pictured = Images.join(shown), (ids == model.seeing.image_token).int()
            images = {"pixel_values": joined.pixels, "image_grid_thw": joined.grid}
            images = {name: tensor.to(ids.device) for name, tensor in images.items()} | {"mm_token_type_ids": pictured}
        hook = model.decoder.register_forward_hook(lambda *args: found.append(args[2].last_hidden_state))
        try:
            output: Any = model.model(input_ids=ids, use_cache=False, **images)
        finally:
            hook.remove()
        if not bool(output.logits.isfinite().all()):
            raise DataError(
                f"the model of the family {model.family!r} gives logits that are not finite: its weights are broken"
            )
        if not self._states:
            self._read(found[0][0], output.logits[0])
        return found[0]

    def _read(self, states: torch.Tensor, logits: torch.Tensor) -> None:
        """Refuse a head that reads other logits than the model's own ``logits`` (L, V) off its ``states`` (L, d)."""
        model = self._model
        own, kept = model.outputs(states), torch.ones(model.head.size, dtype=torch.bool)
        if model.holes is not None:
            kept[model.holes] = False
        kept = kept.nonzero()[:, 0].to(own.device)
        reason = self._unequal(own[:, kept], logits[:, kept], "the head")
        if reason is not None:
            raise DataError(
                sentences(f"the model family {model.family!r} can't be used: {reason}", "Choose another model")
            )

    def _unequal(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> str | None:
        spread = float(expected.float().std(correction=0))
        off = float((found.float() - expected.float()).abs().max())
        if off <= self._tolerance * spread + 1e-9:
            return None
        return f"{what} differ by {off / (spread or 1.0):.2g} of their spread"


_Check = Callable[[CausalLM, _Reference], str | None]


def _trained(model: CausalLM, reference: _Reference) -> str | None:
    """Return whether packed samples, some with a prompt in common, give other states than each alone."""
    rows = [(p, a) for p, answers in enumerate(reference.answers) for a in range(len(answers))]
    responses = [reference.answers[p][a] for p, a in rows]
    prompts = Prompts.of(model, [reference.prompts[p] for p, _ in rows], [reference.shown[p] for p, _ in rows])
    samples = pack_samples(
        prompts.rows,
        Ragged.from_rows(responses),
        Ragged.from_rows([torch.ones(len(response), dtype=torch.bool) for response in responses]),
        share_prompts=model.shares_prompts,
        device=model.model.device,
        layout=model.layout,
        seen=prompts.seen,
    )
    states = model(samples.input_ids, samples.positions, samples.layout, _states, samples.images)[samples.read]
    at = [(p, a, i) for (p, a), response in zip(rows, responses, strict=True) for i in range(len(response))]
    return reference.differs(states, at, "packed documents")


def _generated(model: CausalLM, reference: _Reference) -> str | None:
    """Return whether answers that grow by a token at a time behind their prompts get other states than each alone.

    The caches of some families give others than a forward without one: those compute each document anew for each token.
    """
    model.recomputes = False
    reason = _tried(_grown, model, reference)
    if reason is not None and model.route == "rows":
        model.recomputes = True
        logger.info("the cache of %r: %s", model.family, reason)
        return _grown(model, reference)
    return reason


def _tried(check: _Check, model: CausalLM, reference: _Reference) -> str | None:
    """Return what ``check`` says; or what it provokes in a model that is run otherwise than it knows, whatever that
    is.
    """
    try:
        return check(model, reference)
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]


def _grown(model: CausalLM, reference: _Reference) -> str | None:
    prompts = Prompts.of(model, reference.prompts, reference.shown)
    lengths, copies, cache = prompts.rows.lengths, len(reference.answers[0]), model.new_cache()
    documents = [(p, a) for p in range(len(lengths)) for a in range(copies)]
    layout = cache.append(lengths, copies)
    positions = prompts.placed(layout.positions)
    last = _run(model, prompts.rows.values, layout, positions, prompts.images)[layout.last.to(model.model.device)]
    last = last.repeat_interleave(copies, 0)
    reason = reference.differs(last, [(p, a, 0) for p, a in documents], "prompts")
    if reason is not None:
        return reason
    # Beside them once more, as after a change of the weights: one token of each answer is there already.
    begun = [reference.answers[p][a][:1] for p, a in documents]
    layout = cache.resume(lengths, torch.full_like(lengths, copies), torch.ones(len(begun), dtype=torch.int64))
    positions = prompts.before(layout.positions, torch.tensor([p for p, _ in documents]))
    ids = torch.cat([prompts.rows.values, *begun])
    last = _run(model, ids, layout, positions, prompts.images)[layout.last.to(model.model.device)]
    reason = reference.differs(last, [(p, a, 1) for p, a in documents], "begun answers")
    rows = [(p, a, done) for done in (0, 1) for p, a in documents]
    return reason or _decoded(model, reference, cache, rows, prompts.shift)


def _decoded(
    model: CausalLM, reference: _Reference, cache: RowCache, rows: list[tuple[int, int, int]], shift: torch.Tensor
) -> str | None:
    """Grow the ``rows`` (prompt, answer, tokens that are there) of ``cache`` until each has its answer but a token.

    Positions are ``shift`` (P,) further than places behind each prompt.
    """
    while True:
        kept = torch.tensor([done < len(reference.answers[p][a]) - 1 for p, a, done in rows])
        source, target = closing(kept)
        cache.move(source, target, int(kept.sum()))
        for to, origin in zip(target.tolist(), source.tolist(), strict=True):
            rows[to] = rows[origin]
        rows = rows[: int(kept.sum())]
        if not rows:
            return None
        tokens = torch.stack([reference.answers[p][a][done] for p, a, done in rows])
        layout = cache.extend()
        states = _run(model, tokens, layout, layout.positions + shift[[p for p, _, _ in rows]])
        rows = [(p, a, done + 1) for p, a, done in rows]
        reason = reference.differs(states, rows, "decoded tokens")
        if reason is not None:
            return reason


def _run(
    model: CausalLM, ids: torch.Tensor, layout: Placed, positions: torch.Tensor, images: Images | None = None
) -> torch.Tensor:
    device = model.model.device
    states: torch.Tensor = model(ids.to(device), positions.to(device), layout, _states, images)
    return states


def _states(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    return hidden


def ordinary_tokens(model: CausalLM) -> Iterator[int]:
    """Yield the ids of ordinary tokens, always the same ones: no id that the config names, such as that of an image."""
    config = model.model.config.get_text_config().to_dict() | model.model.config.to_dict()
    named = {value for key, value in config.items() if key.endswith("token_id") and isinstance(value, int)}
    count = int(model.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    order = torch.randperm(min(count, 4096), generator=torch.Generator().manual_seed(0)).tolist()
    ordinary = [token for token in order if token not in named]
    return cycle(ordinary or order)


def next_tokens(tokens: Iterator[int], length: int) -> torch.Tensor:
    """Return the next ``length`` of ``tokens``, (length,) int64."""
    return torch.tensor(list(islice(tokens, length)))


def _rounded(model: CausalLM) -> bool:
    return any(weight.dtype in (torch.bfloat16, torch.float16) for weight in model.parameters())


@contextmanager
def _undisturbed(model: CausalLM) -> Iterator[None]:
    """Run the block without gradients and log lines of transformers, products in the weights' own dtype where they have
    one.
    """
    compute = model.compute_dtype
    if not _rounded(model):
        model.compute_dtype = torch.float32
    try:
        with quiet(), torch.no_grad(), model.computing():
            yield
    finally:
        model.compute_dtype = compute


@contextmanager
def _stirred(model: CausalLM) -> Iterator[None]:
    """Let fresh adapters, which change nothing, change something for the block, so that a route that leaves them out is
    seen.
    """
    generator = torch.Generator().manual_seed(0)
    weights: list[Any] = [up.weight for layer in adapted_layers(model).values() for up in layer.lora_B.values()]
    kept = [weight.clone() for weight in weights]
    for weight in weights:
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    try:
        yield
    finally:
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
