"""What an engine of another package is asked for, and what all of them are started with."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from tandem.models.layouts.positions import Context
from tandem.models.token_ids import TokenIds
from tandem.rollout.protocol import Sampling

Part = Literal["weights", "kv_cache"]

_FREE_PART = 0.5  # of the memory that is free on a CPU: the trainer lives in it too


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """What a core is started with. ``path``: the model's folder, of whose weights nothing is read where they are
    ``filled`` later: until then they are noise, which no comparison takes for a model. ``tokens`` that there are; None:
    all that the model embeds."""

    path: str
    filled: bool
    dtype: Literal["float32", "bfloat16"]
    trust_remote_code: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    gpu_memory_utilization: float
    enable_chunked_prefill: bool
    tensor_model_parallel_size: int = 1
    tokens: TokenIds | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The rest of a sample. A greedy one takes the likeliest token; the others are drawn, as ``Sampling`` says, from a
    random stream that is a function of ``seed``, which is below 2^63."""

    greedy: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Drawn:
    """What one step drew for the request ``key``: tokens, their log-probs, and why it has ended, if it has."""

    key: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: Literal["stop", "length"] | None


class Core(Protocol):
    """An engine that is told what to do between two tokens: ``VllmCore`` and ``SglangCore``, each under a
    ``CoreEngine``.
    """

    @property
    def context(self) -> Context:
        """The longest prompt with its answer."""

    def objection(self, sampling: Sampling) -> str | None:
        """Return which part of ``sampling`` it can't follow, and what to write instead; None where it can."""

    def add(self, key: str, tokens: Sequence[int], wanted: Wanted) -> None:
        """Begin with a request: draw what is ``wanted`` after these tokens."""

    def abort(self, keys: Sequence[str]) -> None:
        """Forget the requests with these keys, wherever they are."""

    def step(self) -> list[Drawn]:
        """Make a step for everything in flight: some get a token more at least, unless a prompt is long."""

    def take_over(self, weights: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
        """Generate with ``weights`` (Hugging Face names), a complete set, from the next step on.

        What begins later shares no prefix with what began before: its keys and values are of other weights.
        """

    def sleep(self) -> None:
        """Give up the device's memory; weights are kept beside."""

    def wake(self, part: Part) -> None:
        """Have this part back; weights first."""


@dataclass(frozen=True)
class KvNeed:
    """Keys and values of as many samples as may be in flight, all as long as they may be: ``tokens`` in all, each of
    ``bytes_each``; ``longest`` of one sample."""

    longest: int
    tokens: int
    bytes_each: int

    @classmethod
    def of(cls, settings: CoreSettings, block: int = 1) -> KvNeed:
        """Return what the model in ``settings.path`` needs, where memory is given in blocks of that many tokens."""
        config: Any = importlib.import_module("transformers").AutoConfig.from_pretrained(
            settings.path, trust_remote_code=settings.trust_remote_code
        )
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        each = 2 * text.num_hidden_layers * heads * size * getattr(torch, settings.dtype).itemsize
        longest = settings.max_model_len or text.max_position_embeddings
        return cls(longest, settings.max_num_seqs * -(-longest // block) * block, each)


def memory_for_kv(settings: CoreSettings) -> int:
    """Return the bytes of this machine's memory that keys and values may take on a CPU."""
    psutil: Any = importlib.import_module("psutil")  # which comes with the engines
    free = int(psutil.virtual_memory().available)
    return int(settings.gpu_memory_utilization * _FREE_PART * free)
