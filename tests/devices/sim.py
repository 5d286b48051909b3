"""Simulated devices ``sim:0``, ``sim:1``, …: tensors there are computed on the CPU, under the rules of an accelerator.

Importing this registers them, so a run has them in all its processes with ``plugins: [tests.devices.sim]``. An
operation that mixes tensors of a device with tensors of the CPU (other than 0-dimensional ones) or of another device
raises, as it does on CUDA. Each device has an ``Account`` of its memory and of the copies from and to it.

It rests on torch's experimental support of backends in Python. The C++ of torch knows one such device only, so it is
always told ``sim:0``, and the index is Python's alone. There are no streams, and ``fully_shard``, which resizes
storages, does not run here.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tandem.base.device_kinds import DeviceKind, register_device
from tests.devices.sim_account import Account, Copy, Direction, hold

NAME = "sim"
COUNT = int(os.environ.get("SIM_DEVICES", "8"))
LIMIT = int(os.environ.get("SIM_LIMIT", str(1 << 62)))

aten = torch.ops.aten
_COPIES = {aten.copy_.default, aten._to_copy.default}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_WAITS = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.repeat_interleave.Tensor}
_LOW = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default)

_seen = threading.local()  # the index of the last result, by thread
plain_attention: list[tuple[int, ...]] = []
"""Shapes of queries for which CUDA has only the kernel with a table of all scores: of torch's fused ones, flash
attention takes no mask and no float32, and the memory-efficient one no grouped heads."""
accounts = [Account(index, LIMIT) for index in range(COUNT)]


class _Module:
    """What torch asks of the module of a device."""

    _current = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = device if isinstance(device, int) else torch.device(device).index or 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        account = accounts[_index(device)]
        return account.limit - account.allocated, account.limit

    def memory_allocated(self, device: Any = None) -> int:
        return accounts[_index(device)].allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        accounts[_index(device)].reset_peak()

    def memory_reserved(self, device: Any = None) -> int:
        return accounts[_index(device)].allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return accounts[_index(device)].peak


_module = _Module()
_setup_privateuseone_for_python_backend(NAME, backend_module=_module)
register_device(DeviceKind(NAME, "gloo"))
# Parameters stay the objects that they are when a module goes to the device, as they do on the way to CUDA.
torch.__future__.set_swap_module_params_on_conversion(True)


class SimTensor(torch.Tensor):
    """A tensor on a device; ``inner`` holds its values on the CPU."""

    inner: torch.Tensor
    index: int

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int) -> SimTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made._held = hold(accounts[index], inner)
        made.inner, made.index = inner, index
        return made

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, self.index)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What C++ would take for the device where the tensor is already."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or not _is_sim(device) or _index(device) == self.index:
            return super().to(*args, **kwargs)
        return torch.empty_like(self, device=device, dtype=dtype or self.dtype).copy_(self)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Take lists by way of the CPU: C++ knows no way from them to a device in Python."""
        parts = index if isinstance(index, tuple) else (index,)
        made = tuple(_tensor(part) if isinstance(part, list) else part for part in parts)
        return super().__getitem__(made if isinstance(index, tuple) else made[0])

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def storage(self) -> torch.TypedStorage:
        return self.inner.storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> SimTensor:
        return SimTensor(self.inner.clone(), self.index).requires_grad_(self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SimTensor({self.inner!r}, index={self.index})"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    whole = [tensor for tensor in tensors if isinstance(tensor, SimTensor)]
    # A number is made where C++ has its only device, and may meet tensors of any.
    there = {tensor.index for tensor in whole if tensor.dim()} or {tensor.index for tensor in whole}
    target = kwargs.get("device")
    if func not in _COPIES:
        _refuse_mixed(func, tensors, there)
    result = func(*tree_map(_inside, args), **_plain(kwargs))
    _note_copies(func, args, kwargs, there, result)
    returns = func._schema.returns
    if not returns or func is aten._local_scalar_dense.default:
        return result if returns else None
    if func.namespace == "c10d":
        return result
    if func._schema.name.endswith("_") and returns[0].alias_info is not None and returns[0].alias_info.is_write:
        return args[0]  # in place: the tensor that came in
    index = min(there, default=None) if target is None else _index(target) if _is_sim(target) else None
    if index is not None:
        index = _meant(index, there)

    def outside(value: Any) -> Any:
        plain = isinstance(value, torch.Tensor) and not isinstance(value, SimTensor)
        return SimTensor(value, index) if plain and index is not None else value

    return tree_map(outside, result)


def _meant(index: int, there: set[int]) -> int:
    """The index where a result is to be: a backward that is written in C++ asks for its only device, ``sim:0``."""
    if torch._C._current_autograd_node() is not None:  # type: ignore[attr-defined]
        index = min(there, default=getattr(_seen, "index", index))
    _seen.index = index
    return index


def _refuse_mixed(func: Any, tensors: list[torch.Tensor], there: set[int]) -> None:
    """Raise as CUDA does, which takes indices from the CPU."""
    outside = [t for t in tensors if not isinstance(t, SimTensor) and t.dim() > 0]
    if func in _INDEXED:
        outside = [t for t in outside if t.dtype not in (torch.int64, torch.bool)]  # these are indices
    if len(there) > 1 or (there and outside):
        devices = sorted({str(tensor.device) for tensor in tensors})
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, found {' and '.join(devices)}: {shapes}"
        )


def _note_copies(func: Any, args: Any, kwargs: dict[str, Any], there: set[int], result: Any) -> None:
    """Note what ``func`` moved between the host and devices, or waited for."""
    source = args[1] if func is aten.copy_.default else args[0] if args else None
    target = args[0] if func is aten.copy_.default else None
    if func in _COPIES and isinstance(source, torch.Tensor):
        come = source.index if isinstance(source, SimTensor) else None
        device = kwargs.get("device")
        gone = come if device is None else _meant(_index(device), there) if _is_sim(device) else None
        if target is not None:
            gone = target.index if isinstance(target, SimTensor) else None
        if come != gone:
            _note("to_device" if come is None else "to_host" if gone is None else "between", come, gone, source, func)
    elif there and func in _INDEXED:
        for moved in args[1]:
            if isinstance(moved, torch.Tensor) and not isinstance(moved, SimTensor):
                _note("to_device", None, min(there), moved, func)
    elif there and (func is aten._local_scalar_dense.default or func in _WAITS):
        _note("to_host", min(there), None, args[0], func)


def _note(direction: Direction, come: int | None, gone: int | None, moved: torch.Tensor, func: Any) -> None:
    for index in {come, gone} - {None}:
        accounts[index or 0].copies.append(Copy(direction, moved.numel() * moved.element_size(), str(func)))


def _inside(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = tree_map(_inside, kwargs)
    if plain.get("pin_memory"):
        plain["pin_memory"] = False  # there is nothing that the host's memory could be pinned for
    return plain


def _is_sim(device: Any) -> bool:
    return torch.device(device).type == NAME


def _index(device: Any) -> int:
    """The index of a device, of which torch may have lost it: then the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _module.current_device() if index is None else index


def _cast(func: Any) -> Any:
    """``func`` as autocast runs it on an accelerator: float32 tensors are cast to its dtype first."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            wide = lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.dtype == torch.float32 else v  # noqa: E731
            return func(*tree_map(wide, args), **tree_map(wide, kwargs))

    return cast


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by plain products, as torch's own in C++ would make its mask on ``sim:0``."""
    assert dropout_p == 0.0
    low = query.dtype in (torch.bfloat16, torch.float16) and attn_mask is None
    if enable_gqa and not low and query.shape[-2] > 1:
        plain_attention.append(tuple(query.shape))
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # a row that sees nothing gives 0, as on CUDA
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value


_tensor = torch.tensor


def _tensor_there(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """``torch.tensor``, which in C++ knows no way to a device in Python: made on the CPU, then moved."""
    if device is None or not _is_sim(device):
        return _tensor(data, device=device, **options)
    return _tensor(data, **options).to(device)


_device_constructors()  # what `with torch.device(...)` acts on is looked up once: torch's own function must be among it
torch.tensor = _tensor_there  # type: ignore[assignment]
_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")  # what makes tensors here
_fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_kernels = torch.library.Library("aten", "IMPL")
for _operation in _LOW:
    _kernels.impl(_operation, _cast(_operation), "AutocastPrivateUse1")
_kernels.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
