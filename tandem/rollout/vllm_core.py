"""vLLM's own engine in this process, as the adapter uses it: started, stepped, given weights. Imports vLLM on use.

Everything is called by one thread: CUDA's current stream and OpenMP's pool belong to a thread.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from tandem.base.errors import DataError
from tandem.models.token_ids import TokenIds

T = TypeVar("T")

CPU_BLOCK = 32
"""Tokens in a block of keys and values: the least that its CPU kernels take, so that short prompts are shared too."""

LOWEST_TEMPERATURE = 0.01
"""vLLM raises what is below."""

_FREE_PART = 0.5  # of the memory that is free on a CPU: the trainer lives in it too


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """What vLLM is started with. ``path``: the model's folder, of whose weights nothing is read where they are
    ``filled`` later: until then they are noise, which no comparison takes for a model. ``tokens`` that there are; None:
    all that the model embeds."""

    path: str
    filled: bool
    dtype: Literal["float32", "bfloat16"]
    trust_remote_code: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    tensor_model_parallel_size: int
    gpu_memory_utilization: float
    enable_chunked_prefill: bool
    tokens: TokenIds | None = None


@dataclass(frozen=True)
class Drawn:
    """What one step drew for the request ``key``: tokens, their log-probs, and why it has ended, if it has."""

    key: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: Literal["stop", "length"] | None


class Core(Protocol):
    """An engine that is told what to do between two tokens."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""

    def add(self, key: str, tokens: Sequence[int], salt: str, sampling: dict[str, Any]) -> None:
        """Begin with a request. Prompts share a prefix only under one ``salt``."""

    def abort(self, keys: Sequence[str]) -> None:
        """Forget the requests with these keys."""

    def step(self) -> list[Drawn]:
        """Draw a token more for every request."""

    def take_over(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Generate with ``weights`` (Hugging Face names), a complete set, from the next step on."""

    def sleep(self) -> None:
        """Give up the device's memory; weights are kept beside."""

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Have this part back; weights first."""


class VllmCore:
    """A ``Core`` over ``vllm.LLMEngine``. Raises ``DataError`` where vLLM can't be started with the settings."""

    def __init__(self, settings: CoreSettings) -> None:
        self._own = ThreadPoolExecutor(1, "vllm")
        self._cuda = torch.cuda.is_available()
        # Functions go to a worker's process by value: it need not find this package.
        importlib.import_module("cloudpickle").register_pickle_by_value(importlib.import_module(__name__))
        self._engine: Any = self._call(lambda: _start(settings, self._cuda))
        if (known := settings.tokens) is not None:
            places = (known.count, list(known.holes))
            self._call(lambda: self._engine.collective_rpc(hide_rest, args=places))
        vllm: Any = importlib.import_module("vllm")
        kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind
        self._params: Any = vllm.SamplingParams
        self._fixed = {"logprobs": 0, "detokenize": False, "ignore_eos": True, "output_kind": kinds.DELTA}

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer, as vLLM has settled it."""
        return int(self._engine.model_config.max_model_len)

    def add(self, key: str, tokens: Sequence[int], salt: str, sampling: dict[str, Any]) -> None:
        """Begin with a request; ``salt`` keeps its prefix apart from those under others."""
        params = self._params(**self._fixed, **sampling)
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": salt}
        self._call(lambda: self._engine.add_request(key, prompt, params))

    def abort(self, keys: Sequence[str]) -> None:
        """Have vLLM forget the requests with these keys."""
        self._call(lambda: self._engine.abort_request(list(keys)))

    def step(self) -> list[Drawn]:
        """Make one step of vLLM; what it drew for each request."""
        return [_drawn(output) for output in self._call(self._engine.step)]

    def take_over(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load the weights in every worker, and forget the prefixes of the old ones."""
        self._call(lambda: self._engine.collective_rpc(reload_weights, args=(list(weights),)))
        self._call(self._engine.reset_prefix_cache)

    def sleep(self) -> None:
        """Give up the device's memory; on a CPU vLLM frees nothing."""
        if self._cuda:
            self._call(lambda: self._engine.sleep(level=1))

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Have this part of the device's memory back; nothing to do on a CPU."""
        if self._cuda:
            self._call(lambda: self._engine.wake_up([part]))

    def _call(self, work: Callable[[], T]) -> T:
        return self._own.submit(work).result()


def reload_weights(worker: Any, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Put, in a worker of vLLM's, ``weights`` in place of the model's, and of what was made from them.

    A CPU's kernels read a packed copy of each matrix. vLLM packs anew what it has loaded; of two modules that share a
    matrix, such as embedding and head, only the first is loaded, and the other would go on with its old copy.
    """
    # Copies, as vLLM keeps what it is given until a layer is complete.
    worker.reload_weights(weights_iterator=((name, tensor.clone()) for name, tensor in weights))
    owners: dict[int, list[Any]] = {}
    for module in worker.get_model().modules():
        if getattr(module, "quant_method", None) is not None and hasattr(module, "weight"):
            owners.setdefault(id(module.weight), []).append(module)
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)


def hide_rest(worker: Any, count: int, holes: list[int]) -> None:
    """Draw, in a worker of vLLM's, no id from ``count`` on and none of ``holes``; log-probs are among the others."""
    gone: list[torch.Tensor] = []

    def hide(module: Any, inputs: Any, logits: torch.Tensor | None) -> torch.Tensor | None:
        if logits is not None:  # a worker that gathers nothing has none
            if not gone:
                gone.append(torch.tensor([*holes, *range(count, logits.shape[-1])], device=logits.device))
            logits.index_fill_(-1, gone[0], -torch.inf)
        return logits

    for module in worker.get_model().modules():
        if type(module).__name__ == "LogitsProcessor" and (holes or count < module.org_vocab_size):
            module.register_forward_hook(hide)


def _start(settings: CoreSettings, cuda: bool) -> Any:
    usual = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are made here, one by one
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer computes beside it
    }
    for name, value in usual.items():
        os.environ.setdefault(name, value)
    vllm: Any = importlib.import_module("vllm")
    try:
        return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**_arguments(settings, cuda)))
    except (ValueError, OSError, NotImplementedError) as error:
        raise DataError(f"vLLM can't be started with the model {settings.path!r}: {error}") from error


def _arguments(settings: CoreSettings, cuda: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's engine."""
    longest, together = settings.max_model_len, settings.max_num_batched_tokens
    # vLLM rewinds the random stream of a sample whose prompt comes in parts, and a CPU's can't be.
    in_parts = settings.enable_chunked_prefill and cuda
    least = settings.max_num_seqs if in_parts else max(settings.max_num_seqs, longest or 0)
    arguments = {
        "model": settings.path,
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "load_format": "dummy" if settings.filled else "auto",
        "max_model_len": longest,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(least, together),  # a smaller budget is refused
        "enable_chunked_prefill": in_parts,
        "enable_prefix_caching": True,
        "tensor_parallel_size": settings.tensor_model_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_model_parallel_size == 1 else "mp",
        "logprobs_mode": "processed_logprobs",  # of the distribution that a token is drawn from
        "async_scheduling": False,  # else tokens of old weights would come after new ones
        "disable_log_stats": True,
    }
    if cuda:
        return {**arguments, "gpu_memory_utilization": settings.gpu_memory_utilization, "enable_sleep_mode": True}
    most = int(settings.gpu_memory_utilization * _FREE_PART * free_memory())
    return {
        **arguments,
        "enforce_eager": True,
        "block_size": CPU_BLOCK,
        "kv_cache_memory_bytes": min(most, needed_kv_bytes(settings)),
    }


def needed_kv_bytes(settings: CoreSettings) -> int:
    """Return the keys and values of as many samples as may be in flight, all as long as they may be."""
    config: Any = importlib.import_module("transformers").AutoConfig.from_pretrained(
        settings.path, trust_remote_code=settings.trust_remote_code
    )
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    a_token = 2 * text.num_hidden_layers * heads * size * getattr(torch, settings.dtype).itemsize
    tokens = settings.max_model_len or text.max_position_embeddings
    blocks = settings.max_num_seqs * -(-tokens // CPU_BLOCK) + 1  # vLLM keeps one for itself
    return int(blocks * CPU_BLOCK * a_token)


def free_memory() -> int:
    """Return the bytes of memory that processes of this machine can still take."""
    psutil: Any = importlib.import_module("psutil")  # which comes with vLLM
    return int(psutil.virtual_memory().available)


def _drawn(output: Any) -> Drawn:
    (sample,) = output.outputs
    tokens = list(sample.token_ids)
    logprobs = [found[token].logprob for found, token in zip(sample.logprobs or (), tokens, strict=True)]
    return Drawn(output.request_id, tokens, logprobs, sample.finish_reason if output.finished else None)
