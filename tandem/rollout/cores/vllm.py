"""vLLM's own engine in this process, as the adapter uses it: started, stepped, given weights. Imports vLLM on use.

Everything is called by one thread: CUDA's current stream and OpenMP's pool belong to a thread.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tandem.base.errors import DataError
from tandem.models.layouts.positions import Context
from tandem.rollout.cores.core import CoreSettings, Drawn, KvNeed, Part, Wanted, memory_for_kv
from tandem.rollout.protocol import Sampling

T = TypeVar("T")

CPU_BLOCK = 32
"""Tokens in a block of keys and values: the least that its CPU kernels take, so that short prompts are shared too."""

LOWEST_TEMPERATURE = 0.01
"""vLLM raises what is below."""


class VllmCore:
    """A ``Core`` over ``vllm.LLMEngine``. Raises ``DataError`` where vLLM can't be started with the settings."""

    def __init__(self, settings: CoreSettings) -> None:
        self._own = ThreadPoolExecutor(1, "vllm")
        self._cuda = torch.cuda.is_available()
        self._loads = 0
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
    def context(self) -> Context:
        """The longest prompt with its answer, as vLLM has settled it."""
        longest = int(self._engine.model_config.max_model_len)
        return Context(longest, f"vLLM's max_model_len is {longest}")

    def objection(self, sampling: Sampling) -> str | None:
        """Return which part of ``sampling`` vLLM can't follow."""
        return objection(sampling)

    def add(self, key: str, tokens: Sequence[int], wanted: Wanted) -> None:
        """Begin with a request; its prefix is shared with those of the same load alone."""
        drawn: dict[str, Any] = {"temperature": 0.0}
        if not wanted.greedy:
            drawn = {"temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k}
            drawn["seed"] = wanted.seed
        ends = {"max_tokens": wanted.max_tokens, "stop_token_ids": list(wanted.stop_token_ids)}
        params = self._params(**self._fixed, **drawn, **ends)
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": f"load {self._loads}"}
        self._call(lambda: self._engine.add_request(key, prompt, params))

    def abort(self, keys: Sequence[str]) -> None:
        """Have vLLM forget the requests with these keys."""
        self._call(lambda: self._engine.abort_request(list(keys)))

    def step(self) -> list[Drawn]:
        """Make one step of vLLM; return what it drew for each request."""
        return [_drawn(output) for output in self._call(self._engine.step)]

    def take_over(self, weights: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
        """Load the weights in every worker, and forget the prefixes of the old ones. vLLM counts no versions."""
        del version
        self._call(lambda: self._engine.collective_rpc(reload_weights, args=(list(weights),)))
        self._call(self._engine.reset_prefix_cache)
        self._loads += 1

    def sleep(self) -> None:
        """Give up the device's memory; on a CPU vLLM frees nothing."""
        if self._cuda:
            self._call(lambda: self._engine.sleep(level=1))

    def wake(self, part: Part) -> None:
        """Have this part of the device's memory back; nothing to do on a CPU."""
        if self._cuda:
            self._call(lambda: self._engine.wake_up([part]))

    def _call(self, work: Callable[[], T]) -> T:
        return self._own.submit(work).result()


def objection(sampling: Sampling) -> str | None:
    """Return which part of ``sampling`` vLLM can't follow, and what to write instead."""
    if not sampling.greedy and sampling.temperature < LOWEST_TEMPERATURE:
        return (
            f"temperature = {sampling.temperature!r}: vLLM draws at {LOWEST_TEMPERATURE} or above: write that, or "
            "greedy=True"
        )
    if sampling.logprobs_of == "full" and (sampling.top_p < 1 or sampling.top_k > 0) and not sampling.greedy:
        return (
            "logprobs_of = 'full': vLLM tells log-probs of what is left after top_p and top_k: write 'sampled', or "
            "keep all tokens"
        )
    return None


def reload_weights(worker: Any, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Put ``weights``, in a worker of vLLM's, in place of the model's and of what was made from them.

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
    """Let a worker of vLLM's draw no id from ``count`` on and none of ``holes``; log-probs are among the others."""
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
    """Translate ``settings`` into the arguments of vLLM's engine."""
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
    need = KvNeed.of(settings, CPU_BLOCK)
    least_bytes = (need.tokens + CPU_BLOCK) * need.bytes_each  # vLLM keeps a block for itself
    return {
        **arguments,
        "enforce_eager": True,
        "block_size": CPU_BLOCK,
        "kv_cache_memory_bytes": min(memory_for_kv(settings), least_bytes),
    }


def _drawn(output: Any) -> Drawn:
    (sample,) = output.outputs
    tokens = list(sample.token_ids)
    logprobs = [found[token].logprob for found, token in zip(sample.logprobs or (), tokens, strict=True)]
    return Drawn(output.request_id, tokens, logprobs, sample.finish_reason if output.finished else None)
