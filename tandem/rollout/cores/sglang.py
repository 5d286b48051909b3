"""SGLang's scheduler as the adapter uses it: started, stepped, given weights by its own requests. Imports it on use."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import torch

from tandem.base.errors import DataError, TandemError
from tandem.models.layouts.positions import Context
from tandem.models.token_ids import TokenIds
from tandem.rollout.cores.core import CoreSettings, Drawn, KvNeed, Part, Wanted, memory_for_kv
from tandem.rollout.cores.sglang_loop import SchedulerLoop
from tandem.rollout.cores.shared_prompts import SharedPrompts
from tandem.rollout.protocol import Sampling

LOWEST_TEMPERATURE = 1e-6
"""Below it SGLang takes the likeliest token, and tells its log-prob at temperature 1."""

_ROOM = 8  # tokens of a context that SGLang keeps for itself
_NEVER_S = 1e9  # whoever started this process watches it


class SglangCore:
    """A ``Core`` over ``sglang``'s ``Scheduler``. Raises ``DataError`` where it can't be started with the settings."""

    def __init__(self, settings: CoreSettings) -> None:
        cuda = torch.cuda.is_available()
        if not cuda:  # before anything imports the compiler: it would take longer than what it speeds up
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"  # else log-probs would be those at temperature 1
        logging.getLogger("sglang").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="sglang")  # of what other devices have
        self._messages: Any = importlib.import_module("sglang.srt.managers.io_struct")
        self._params: Any = importlib.import_module("sglang.srt.sampling.sampling_params").SamplingParams
        self._longest, self._loop = _started(settings, cuda)
        self._scheduler = self._loop.scheduler
        self._waiting: SharedPrompts[Any] = SharedPrompts()
        self._stops: dict[str, frozenset[int]] = {}  # of what is in flight, by key
        self._version: str | None = None  # that SGLang was told last
        self._loads = 0

    @property
    def context(self) -> Context:
        """The longest prompt with its answer."""
        return Context(self._longest, f"SGLang was started with a context of {self._longest}")

    def objection(self, sampling: Sampling) -> str | None:
        """Return which part of ``sampling`` SGLang can't follow."""
        return objection(sampling)

    def add(self, key: str, tokens: Sequence[int], wanted: Wanted) -> None:
        """Begin with a request, once nobody computes its prompt."""
        drawn: dict[str, Any] = {"temperature": 0.0}
        if not wanted.greedy:
            drawn = {"temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k}
        params = self._params(
            **drawn,
            sampling_seed=wanted.seed,
            max_new_tokens=wanted.max_tokens,
            stop_token_ids=set(wanted.stop_token_ids),
            ignore_eos=not wanted.stop_token_ids,
        )
        params.normalize(None)
        request = self._messages.TokenizedGenerateReqInput(
            rid=_rid(key),
            input_text=None,
            input_ids=array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=True,
        )
        self._stops[key] = frozenset(wanted.stop_token_ids)
        self._waiting.add(key, tuple(tokens), request)

    def abort(self, keys: Sequence[str]) -> None:
        """Have SGLang forget the requests with these keys; it does so in the next step."""
        for key in keys:
            del self._stops[key]
            if not self._waiting.remove(key):
                self._ordered(self._messages.AbortReq(rid=_rid(key)))

    def step(self) -> list[Drawn]:
        """Make one step of SGLang, a prefill or a decode; return what it drew for each request."""
        requests, drawn = self._waiting.take(), []
        for request in requests:  # which share a prefix with those of the same load alone
            request.cache_salt = f"load {self._loads}"
        for output in self._loop.step(requests):
            if isinstance(output, self._messages.BatchTokenIDOutput):
                drawn += [self._drawn(output, i) for i, rid in enumerate(output.rids) if rid[:-1] in self._stops]
        for one in drawn:
            self._waiting.begun(one.key)
            if one.reason is not None:
                del self._stops[one.key]
        return drawn

    def take_over(self, weights: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
        """Load the weights, and forget the prefixes of the old ones where nothing in flight has them."""
        messages = self._messages
        self._weights_order(messages.BeginWeightUpdateReqInput())
        try:
            self._weights_order(
                messages.UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=[list(weights)], flush_cache=False, weight_version=str(version)
                )
            )
        finally:
            self._weights_order(messages.EndWeightUpdateReqInput())
        self._version = str(version)
        self._loads += 1
        if not self._stops:
            self._forget_prefixes()

    def sleep(self) -> None:
        """Give up the device's memory; on a CPU SGLang frees nothing."""
        self._settle()
        tags = ["kv_cache", "weights"]
        self._ordered(self._messages.ReleaseMemoryOccupationReqInput(tags=tags))

    def wake(self, part: Part) -> None:
        """Have this part of the device's memory back, if it was given up."""
        if part in self._scheduler.weight_updater.offload_tags:
            self._ordered(self._messages.ResumeMemoryOccupationReqInput(tags=[part]))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _drawn(self, output: Any, place: int) -> Drawn:
        """Return what came for one request."""
        key = output.rids[place][:-1]
        tokens, end = list(output.output_ids[place]), output.finished_reasons[place]
        reason: Literal["stop", "length"] | None = None
        if end is not None:
            if end["type"] == "abort":
                raise TandemError(f"SGLang gave a sample up: {end['message']}")
            reason = "stop" if tokens and tokens[-1] in self._stops[key] else "length"
            drew = output.weight_versions[place][-1].version
            if self._version is not None and drew != self._version:
                raise TandemError(f"SGLang drew with weights version {drew}, and was given {self._version}")
        return Drawn(key, tokens, list(output.output_token_logprobs_val[place]), reason)

    def _ordered(self, order: Any) -> Any:
        """Give SGLang one of its own requests, between two turns, and return its answer."""
        return self._loop.call(lambda: self._scheduler._request_dispatcher(order))

    def _weights_order(self, order: Any) -> None:
        """Have SGLang do something to its weights. It answers False where it doesn't."""
        answer = self._ordered(order)
        if not answer.success:
            raise TandemError(f"SGLang does not take the weights ({type(order).__name__}): {answer.message}")

    def _settle(self) -> None:
        """Let what was aborted end."""
        for _ in range(3):
            if self._loop.call(self._scheduler.is_fully_idle):
                return
            self._loop.step(())

    def _forget_prefixes(self) -> None:
        self._settle()
        if not self._loop.call(self._scheduler.flush_cache):
            raise TandemError("SGLang does not forget the keys and values of the old weights: requests are in flight")


def objection(sampling: Sampling) -> str | None:
    """Return which part of ``sampling`` SGLang can't follow, and what to write instead."""
    if sampling.greedy:
        return None
    if sampling.temperature < LOWEST_TEMPERATURE:
        return (
            f"temperature = {sampling.temperature!r}: SGLang draws at {LOWEST_TEMPERATURE} or above: write that, or "
            "greedy=True"
        )
    if sampling.logprobs_of == "sampled" and (sampling.top_p < 1 or sampling.top_k > 0):
        return (
            "logprobs_of = 'sampled': SGLang tells log-probs of what was there before top_p and top_k: write 'full', "
            "or keep all tokens"
        )
    return None


def _rid(key: str) -> str:
    """Return SGLang's name for a request: none is the beginning of another, for it aborts all that begin alike."""
    return f"{key}."


def _started(settings: CoreSettings, cuda: bool) -> tuple[int, SchedulerLoop]:
    runtime: Any = importlib.import_module("sglang.srt.runtime_context")

    def start() -> Any:
        arguments: Any = importlib.import_module("sglang.srt.server_args")
        scheduling: Any = importlib.import_module("sglang.srt.managers.scheduler")
        os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")  # by _ROOM
        if cuda:  # memory of this very process is given up: no library is loaded before it
            importlib.import_module("torch_memory_saver").torch_memory_saver.hook_mode = "torch"
        chosen = arguments.ServerArgs(**_arguments(settings, need, cuda))
        chosen.resolve_once()
        chosen.check_server_args()
        device = torch.cuda.current_device() if cuda else 0
        runtime.publish(chosen, role="scheduler", ranks=runtime.SpawnRanks(world_rank=0, gpu_id=device))
        scheduler = scheduling.Scheduler(chosen, arguments.PortArgs.init_new(chosen))
        # Its switch for seeds turns prefixes off on most devices, and promises more: the seeds are wanted alone.
        runtime.get_context().override("tandem", enable_deterministic_inference=True)
        runner = scheduler.tp_worker.model_runner
        runner.sampler.enable_deterministic = True
        # Who sends weights is in this process: they come as they are, not packed for another.
        scheduler.tp_worker.deserialize_own_rank = lambda payloads: payloads[0]
        scheduler.model_config.hf_eos_token_id = None  # a sample ends with the tokens that are asked for
        if settings.tokens is not None:
            _hide_rest(runner.model, settings.tokens)
        return scheduler

    try:
        need = KvNeed.of(settings)
        return need.longest, SchedulerLoop(start)
    except (ValueError, OSError, NotImplementedError, AssertionError) as error:
        raise DataError(f"SGLang can't be started with the model {settings.path!r}: {error}") from error


def _arguments(settings: CoreSettings, need: KvNeed, cuda: bool) -> dict[str, Any]:
    """Translate ``settings`` into the arguments of SGLang's server."""
    together = max(settings.max_num_batched_tokens, settings.max_num_seqs)
    arguments = {
        "model_path": settings.path,
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "load_format": "dummy" if settings.filled else "auto",
        "context_length": need.longest + _ROOM,
        "max_running_requests": settings.max_num_seqs,
        "max_prefill_tokens": max(together, need.longest + _ROOM),
        "chunked_prefill_size": together if settings.enable_chunked_prefill else -1,
        "sampling_backend": "pytorch",  # which takes seeds
        "grammar_backend": "none",
        "mem_fraction_static": settings.gpu_memory_utilization,
        "disable_overlap_schedule": True,  # else tokens of old weights would come after new ones
        "watchdog_timeout": _NEVER_S,
        "log_level": "error",
    }
    if cuda:
        return {**arguments, "enable_memory_saver": True, "enable_weights_cpu_backup": True}
    room = need.tokens + settings.max_num_seqs * _ROOM
    return {
        **arguments,
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "max_total_tokens": min(memory_for_kv(settings) // need.bytes_each, room),
    }


def _hide_rest(model: Any, known: TokenIds) -> None:
    """Draw no id beyond the ``known`` ones; log-probs are among these."""
    gone: list[torch.Tensor] = []

    def hide(module: Any, inputs: Any, output: Any) -> None:
        logits = output.next_token_logits
        if not gone:
            rest = [*known.holes, *range(known.count, logits.shape[-1])]
            gone.append(torch.tensor(rest, dtype=torch.int64, device=logits.device))
        logits.index_fill_(-1, gone[0], -torch.inf)

    for module in model.modules():
        if type(module).__name__ == "LogitsProcessor":
            module.register_forward_hook(hide)
