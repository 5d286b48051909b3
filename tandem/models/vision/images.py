"""Images in a language model: which token is which patch, where it stands on three axes, and what it is embedded as.

An image token of a prompt is *marked*: it gets an id beyond the embedding, which says the row of image features that
it stands for. So tokens may be packed, shared and laid out in rows as any others, prompts with other images are other
prompts, and a sampled token can't be taken for an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.base.errors import ContractError, DataError
from tandem.columns.images import Images, distinct
from tandem.columns.ragged import Ragged
from tandem.models.families import IMAGE_FAMILIES


@dataclass(frozen=True, eq=False)
class Seen:
    """Prompts with their image tokens marked.

    ``positions`` (N, 3) int64, row by row as ``prompts``: in time, height and width. ``shift`` (B,) int64: how much
    further than its place in the row what follows a prompt stands, which is less than 0 where images have more tokens
    than rows or columns. ``images``: the different ones, in the order that marks count.
    """

    prompts: Ragged
    positions: Ragged
    shift: torch.Tensor
    images: Images

    def placed(self, sample: torch.Tensor, offset: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return where the T tokens of a row stand on three axes, (3, T).

        Each is of a ``sample`` (T,): the token ``offset`` (T,) of its prompt, or with -1 one behind it, at its place in
        the whole, ``places`` (T,).
        """
        axes = self.positions.values[self.prompts.offsets[sample] + offset.clamp(min=0)].T
        return torch.where(offset >= 0, axes, places + self.shift[sample])


@dataclass(frozen=True)
class Vision:
    """What the config of a family says: the id of an ``image_token``, how many patches are ``merged`` to one on each
    side, and the ``first`` id beyond the embedding.
    """

    image_token: int
    merged: int
    first: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Vision | None:
        """Return how ``model`` sees; None for one that is run on text alone."""
        config: Any = model.config
        if config.model_type not in IMAGE_FAMILIES:
            return None
        rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
        return cls(config.image_token_id, config.vision_config.spatial_merge_size, rows)

    def trained(self, model: PreTrainedModel) -> bool:
        """Return whether some weight of the image tower is."""
        plain: Any = model
        return any(weight.requires_grad for weight in plain.model.visual.parameters())

    def smallest(self, model: PreTrainedModel) -> Images:
        """Return an image of noise, always the same, that has two tokens."""
        plain: Any = model
        size = int(plain.model.visual.patch_embed.proj.weight[0].numel())
        generator = torch.Generator().manual_seed(0)
        grid = torch.tensor([[1, self.merged, 2 * self.merged]])
        return Images(torch.randn(int(grid.prod()), size, generator=generator), grid)

    def counts(self, grid: torch.Tensor) -> torch.Tensor:
        """Return the tokens of each image of ``grid`` (I, 3), (I,) int64."""
        return grid.prod(-1) // self.merged**2

    def see(self, prompts: Ragged, images: Sequence[Images | None]) -> Seen | None:
        """Return ``prompts`` as a model sees them; None where none shows an image.

        Raises ``ContractError`` for one with another number of image tokens than its images have.
        """
        every, which = distinct(images)
        if not every:
            return None
        totals = torch.tensor([int(self.counts(one.grid).sum()) for one in every])
        begins = totals.cumsum(0) - totals
        ids = prompts.values.clone()
        pictured = ids == self.image_token
        row = torch.repeat_interleave(prompts.lengths)
        found = torch.bincount(row[pictured], minlength=len(prompts))
        expected = torch.tensor([0 if number is None else int(totals[number]) for number in which])
        if not torch.equal(found, expected):
            wrong = int((found != expected).nonzero()[0])
            raise ContractError(
                f"prompt {wrong} has {int(found[wrong])} image tokens, and its images have {int(expected[wrong])}"
            )
        marks = [torch.arange(int(totals[n])) + int(begins[n]) for n in which if n is not None]
        ids[pictured] = torch.cat(marks) + self.first
        grids = torch.cat([every[number].grid for number in which if number is not None])
        positions, shift = rope_positions(prompts, pictured, grids, self.merged)
        return Seen(prompts.like(ids), prompts.like(positions), shift, Images.join(every))

    def sighted(self, model: PreTrainedModel, decoder: PreTrainedModel, images: Images) -> Sighted:
        """Return ``decoder`` with the features of ``images``, which are computed here, each once."""
        plain: Any = model
        device = plain.device
        found = plain.get_image_features(images.pixels.to(device), images.grid.to(device), return_dict=True)
        deep = [torch.cat(list(level)) if isinstance(level, tuple | list) else level for level in _deep(found)]
        return Sighted(decoder, model.get_input_embeddings(), self.first, torch.cat(list(found.pooler_output)), deep)


def _deep(found: Any) -> Sequence[Any]:
    """Return the features that some families add behind the first layers too."""
    return getattr(found, "deepstack_features", None) or ()


def rope_positions(
    prompts: Ragged, pictured: torch.Tensor, grids: torch.Tensor, merged: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where tokens stand, (N, 3) int64, and ``shift`` (B,) of ``Seen``.

    ``pictured`` (N,) bool: the image tokens. ``grids`` (I, 3): of all images, in order. A text token takes one place on
    all axes. The tokens of an image lie in its grid behind what was before, and what follows stands behind the longer
    of its sides ("Qwen2-VL", arXiv 2409.12191, section 2.1).
    """
    height, width = grids[:, 1] // merged, grids[:, 2] // merged
    counts = grids[:, 0] * height * width
    image = torch.repeat_interleave(counts)  # (tokens of images,)
    within = torch.arange(len(image)) - (counts.cumsum(0) - counts)[image]
    across, area = width[image], (height * width)[image]
    steps = torch.ones(len(pictured), dtype=torch.int64)
    steps[pictured] = torch.where(within == counts[image] - 1, torch.maximum(height, width)[image], 0)
    ends = steps.cumsum(0)
    row = torch.repeat_interleave(prompts.lengths)
    before = nn.functional.pad(ends, (1, 0))[prompts.offsets]  # (B + 1,): all that is before a row
    positions = (ends - steps - before[row])[:, None].repeat(1, 3)
    positions[pictured] += torch.stack([within // area, within % area // across, within % across], -1)
    return positions, before.diff() - prompts.lengths


class Sighted:
    """A decoder that embeds marked tokens as image ``features`` (F, d), and can be called as it is called itself.

    ``deep``: features (F, d) that are added behind each of the first layers.
    """

    def __init__(
        self,
        decoder: PreTrainedModel,
        embedding: nn.Module,
        first: int,
        features: torch.Tensor,
        deep: Sequence[torch.Tensor],
    ) -> None:
        self._decoder, self._embedding, self._first = decoder, embedding, first
        self._features, self._deep = features, deep

    @property
    def config(self) -> Any:
        """The config of the decoder."""
        return self._decoder.config

    @property
    def forward(self) -> Any:
        """The method that says what the decoder takes."""
        return self._decoder.forward

    def __call__(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Run the decoder over ``input_ids`` (B, T), marked ones among them."""
        pictured = input_ids >= self._first
        mark = (input_ids - self._first).clamp(min=0)
        embedded = self._embedding(torch.where(pictured, 0, input_ids))
        features = nn.functional.embedding(mark, self._features.to(embedded.dtype))
        if self._deep:
            options["visual_pos_masks"] = pictured
            options["deepstack_visual_embeds"] = [nn.functional.embedding(mark[pictured], one) for one in self._deep]
        return self._decoder(inputs_embeds=torch.where(pictured[..., None], features, embedded), **options)


FREEZABLE = ("vision_tower", "projector")


def freeze(model: PreTrainedModel, parts: Sequence[str]) -> None:
    """Leave ``parts`` of an image model as they are: the ``vision_tower``, or the ``projector`` between it and the
    language model. Raises ``DataError`` for a model without them.
    """
    tower: Any = getattr(getattr(model, "model", None), "visual", None)
    if not parts:
        return
    if tower is None:
        raise DataError(f"a model of the family {model.config.model_type!r} has no {parts[0]} that could be frozen")
    for name, parameter in tower.named_parameters():
        projects = "merger" in name.partition(".")[0]
        if ("projector" if projects else "vision_tower") in parts:
            parameter.requires_grad_(False)
