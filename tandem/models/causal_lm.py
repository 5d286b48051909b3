"""A transformers causal LM as Tandem runs it: tokens in one row, attention by layout, the head on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tandem.base.errors import ContractError
from tandem.columns.images import Images
from tandem.models.cast_weights import weights_of
from tandem.models.head.projection import PLAIN, Head, Transform
from tandem.models.head.vocabulary import SplitVocabulary
from tandem.models.layouts.attention import IMPLEMENTATION, Decoder, Layout
from tandem.models.layouts.cache import KVCache
from tandem.models.layouts.kv_store import BLOCK, KVPool
from tandem.models.layouts.packing import Documents, PackedLayout
from tandem.models.layouts.positions import Context
from tandem.models.layouts.row_cache import RowCache
from tandem.models.layouts.rows import BorderedLayout, RowsCache, RowsLayout, WholeRows
from tandem.models.layouts.shared_row import Share, SharedRow
from tandem.models.routers import Routers
from tandem.models.token_ids import TokenIds
from tandem.models.vision.images import Vision

R = TypeVar("R")

Route = Literal["packed", "bordered", "rows"]
"""How documents go through a model.

``packed``: in one row, prompts shared, only attention knows where each begins; generation with ``KVCache``.
``bordered``: in one row, nothing shared, every layer knows the borders; generation with the model's own cache.
``rows``: a row each, in a plain transformers model; generation with the model's own cache.
"""
ROUTES: tuple[Route, ...] = ("packed", "bordered", "rows")
"""Fastest first."""

_LAYOUTS: dict[Route, Callable[[Documents, torch.device | str], Layout]] = {
    "packed": PackedLayout,
    "bordered": BorderedLayout,
    "rows": RowsLayout,
}


class CausalLM(nn.Module):
    """Wraps a HF model so that *all* parameters, head included, are used inside one ``forward``.

    That is what sharding needs (parameters are gathered around a forward) and what lets training and generation share
    one set of weights: they differ only in the layout and in what they ``read`` off the hidden states. ``route`` says
    which layouts the model runs by; ``tandem.models.probe`` finds the fastest that is right. ``transform`` is what
    ``measured_transform`` found between the hidden states and the logits. ``tokens``: the ids that are sampled and
    scored, of the V that are embedded; None: all.
    """

    holes: torch.Tensor | None

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: torch.dtype = torch.float32,
        *,
        route: Route = "packed",
        transform: Transform = PLAIN,
        tokens: TokenIds | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokens = tokens
        holes = None if tokens is None or not tokens.holes else torch.tensor(tokens.holes)
        self.register_buffer("holes", holes, persistent=False)
        self.compute_dtype = compute_dtype
        self.transform = transform
        self.proved: frozenset[Literal["training", "generation"]] = frozenset()
        self.route: Route = "rows"
        self.split: SplitVocabulary | None = None  # over ranks that are one model
        self.share: Share | None = None  # of each row, where several ranks compute it
        self.recomputes = False  # generates without a cache, where the model's own is not right
        self.vision = Vision.of(model)
        self.routers = Routers.of(model)
        found: str = self._text._attn_implementation or "eager"
        # A model that was wrapped before no longer says what it was loaded with.
        self._plain = found if found != IMPLEMENTATION else "sdpa" if model._supports_sdpa else "eager"
        self.take(route)

    # --- how documents run -------------------------------------------------------------------------------------------

    def take(self, route: Route) -> None:
        """Run by the layouts of ``route`` from now on; by ``rows`` where the model's attention can't be replaced."""
        wanted = self._plain if route == "rows" else IMPLEMENTATION
        with quiet(), suppress(ValueError, ImportError):
            # An image tower keeps the attention it has: its tokens see those behind them.
            self.model.set_attn_implementation(wanted if self.vision is None else {"text_config": wanted})
        self.route = route if self._text._attn_implementation == wanted else "rows"

    @property
    def _text(self) -> Any:
        """The config that says which attention the decoder has."""
        return self.model.config if self.vision is None else self.model.config.get_text_config()

    @property
    def shares_prompts(self) -> bool:
        """Whether samples that follow each other in a row may have one prompt in common."""
        return self.route != "bordered"

    def layout(self, documents: Documents, device: torch.device | str) -> Layout:
        """Return what runs ``documents`` of a packed row."""
        if self.share is not None:
            return SharedRow(PackedLayout(documents, device), self.share)
        return _LAYOUTS[self.route](documents, device)

    def new_cache(self, rows: int = 1, capacity: int = BLOCK, pool: KVPool | None = None) -> RowCache:
        """Return a cache for generation, with room for ``rows`` of ``capacity`` tokens where that can be said
        before, in the memory of ``pool`` where it is counted so.
        """
        device = self.model.device
        if self.route == "packed":
            return KVCache(device, rows, capacity, pool)
        options = {"layout": WholeRows()} if self.route == "bordered" else None
        return RowsCache(device, options, recompute=self.recomputes)

    # --- the model's parts -------------------------------------------------------------------------------------------

    @property
    def family(self) -> str:
        """What transformers calls the architecture."""
        return str(self.model.config.model_type)

    @property
    def context(self) -> Context | None:
        """The longest document that it may run."""
        config = self.model.config.get_text_config()
        renamed = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
        return Context.of(config.to_dict() | renamed)

    @property
    def decoder(self) -> PreTrainedModel:
        """Everything between token ids and the hidden states that the head reads."""
        return decoder_of(self.model)

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer layers, whatever the architecture calls them: the longest list of modules in the decoder."""
        lists = [module for module in self.decoder.modules() if isinstance(module, nn.ModuleList)]
        if not lists:
            raise ContractError(f"{type(self.model).__name__} has no list of layers: choose another architecture")
        count = getattr(self.model.config.get_text_config(), "num_hidden_layers", None)
        return next((found for found in lists if len(found) == count), max(lists, key=len))

    @property
    def head(self) -> Head:
        """What is read off the hidden states; inside a forward of a split model this rank's part of it."""
        projection: Any = self.model.get_output_embeddings()
        weight: Any = projection.weight
        bias: Any = getattr(projection, "bias", None)
        if isinstance(projection, nn.Linear):
            weight, bias = weights_of(projection)
        count = len(weight) if self.tokens is None else self.tokens.count
        if self.split is not None:
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        return Head(weight, bias, self.transform, count, self.holes, self.split)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the whole model gives for hidden states (N, d): logits (N, V)."""
        return self.head.logits(hidden)

    # --- running it --------------------------------------------------------------------------------------------------

    def computing(self) -> torch.autocast:
        """Return the context in which matrix products run in ``compute_dtype``; weights stay as they are.

        ``forward`` enters it itself. Many forwards with the same weights should share one outer context: cast weights
        are kept for as long as it lasts.
        """
        device = self.model.device.type
        return torch.autocast(device, dtype=self.compute_dtype, enabled=self.compute_dtype == torch.bfloat16)

    def train(self, mode: bool = True) -> CausalLM:
        """Return the model itself, which stays in eval mode: dropout, jitter of routers and the like would train
        another distribution than is sampled from.
        """
        self.training = mode
        self.model.eval()
        return self

    def checkpoint_gradients(self) -> None:
        """Keep only the inputs of each layer for the backward, and compute its activations again there."""
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: Layout,
        read: Callable[[torch.Tensor, Head], R],
        images: Images | None = None,
        routes: torch.Tensor | None = None,
        watched: bool = False,
    ) -> R:
        """Run ``input_ids`` and ``positions`` (T,) int64; returns ``read(hidden (T, d), head)``.

        With ``images`` marked tokens of them are among the ids, and positions are (3, T); see ``Seen``. ``routes`` and
        ``watched``: see ``Routers.begin``.
        """
        if self.routers is not None:
            self.routers.begin(routes, watched)
        elif routes is not None:
            raise ContractError(f"the routers of the family {self.family!r} are not known, so nothing is replayed")
        with self.computing():
            decoder: Decoder = self.decoder
            if images is not None:
                decoder = self.seeing.sighted(self.model, self.decoder, images)
            return read(layout.hidden(decoder, input_ids, positions), self.head)

    @property
    def seeing(self) -> Vision:
        """How it sees images. Raises ``ContractError`` for a model that is run on text alone."""
        if self.vision is None:
            raise ContractError(f"a model of the family {self.family!r} is run on text, and a prompt shows images")
        return self.vision


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of ``model`` that ends with the hidden states that its head reads."""
    for found in (model.get_decoder(), model.base_model, *model.children()):
        if isinstance(found, PreTrainedModel) and found is not model:
            return found
    raise ContractError(f"{type(model).__name__} has no decoder beneath its head: choose another architecture")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence all log lines of transformers but errors."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
