"""A pretended CUDA device: tensors that say they are on cuda:0 and compute on the CPU.

Inside `pretending()` the thread counts what a real device would be asked for, leaf operators (about kernel launches),
copies between host and device and synchronisations, and gets the errors that a real device would raise: tensors of
two devices in one operator, and numpy of a tensor that is not in the host's memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from coppice.engine.steps import StepInputs, Steps
from tests.kernels import keyed_argmax, rotate, tree_attention

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")

# Allocations and questions, which launch nothing; views say themselves that they are ones.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_contiguous", "_fused_sdp_choice"}
FREE |= {"_unsafe_view"}  # a view that does not say so
# How many there are is known after the device is done.
LAUNCHES = {"tree_attention": 3, "keyed_argmax": 2}  # of operators that are several kernels
WAITED_FOR = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal", "is_nonzero"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


@dataclass
class Counts:
    """What a device was asked for."""

    launches: int = 0
    to_device: int = 0
    to_host: int = 0
    waits: int = 0  # synchronisations other than the one that each copy to the host is
    host_bytes: int = 0  # copied to the host

    @property
    def copies(self) -> tuple[int, int]:
        """Those to the device and those to the host."""
        return self.to_device, self.to_host

    def clear(self) -> None:
        """Count from 0 again."""
        self.__dict__.update(Counts().__dict__)


_here = threading.local()  # `counts` of the thread, while it has a device, and `reads`, all copies to the host


class _Pretended(Tensor):
    """A tensor on the device; `inner` holds its numbers, in memory that views share."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Pretended:
        made: _Pretended = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"{self.inner!r} on {DEVICE}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator, some of whose tensors are on the device."""
    counts: Counts = _here.counts
    name = func._schema.name.partition("::")[2]
    hosts = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor) and not isinstance(one, _Pretended)]
    if name == "copy_" and hosts:
        to_host = hosts[0] is args[0]
        _copied(args[0], to_host)
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    if name == "_to_copy" and "device" in kwargs and kwargs.get("dtype") in (None, args[0].dtype):  # not torch's own
        raise AssertionError(f"{func} to {kwargs['device']} was not seen as a copy")
    if name in INDEXING:
        counts.to_device += sum([one.dim() > 0 for one in hosts])  # an index on the host is copied
        hosts = []
        masks = [one for one in tree_iter(args[1]) if isinstance(one, Tensor) and one.dtype is torch.bool]
        counts.waits += len(masks)
    if mixed := [tuple(one.shape) for one in hosts if one.dim()]:
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} with {mixed} on the CPU")
    if name == "_local_scalar_dense":
        _copied(args[0], to_host=True)
    elif name in WAITED_FOR or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        counts.waits += 1
    elif not (name in FREE or func.is_view):
        _launched(name)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": CPU}
    out = func(*tree_map_only(_Pretended, _inner, args), **tree_map_only(_Pretended, _inner, kwargs))
    written = [
        kwargs.get(told.name, args[place] if place < len(args) else None)
        for place, told in enumerate(func._schema.arguments)
        if told.alias_info is not None and told.alias_info.is_write
    ]
    if any(told.alias_info is not None and told.alias_info.is_write for told in func._schema.returns):
        # In place: what was given is given back.
        return written[0] if len(written) == 1 else tuple(written)
    return tree_map_only(Tensor, _Pretended, out)


def _inner(tensor: Any) -> Any:
    return tensor.inner if isinstance(tensor, _Pretended) else tensor


def _copied(tensor: Tensor, to_host: bool) -> None:
    counts: Counts = _here.counts
    if to_host:
        counts.to_host += 1
        _here.reads += 1
        counts.host_bytes += tensor.nbytes
    else:
        counts.to_device += 1


def _launched(name: str) -> None:
    _here.counts.launches += LAUNCHES.get(name, 1)


class _Mode(TorchFunctionMode):
    """Sees to what makes a tensor on a device, takes one there or takes it back: operators see one device only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # there is nothing to pin for
        of = args[0] if args and isinstance(args[0], Tensor) else None
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda) and of is not None:
            return self._to(of, func, list(args[1:]), kwargs)
        if isinstance(of, _Pretended):
            if func in (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            if func is Tensor.tolist:
                _copied(of, to_host=True)
                return of.inner.tolist()
            if func is Tensor.data_ptr:
                return of.inner.data_ptr()
        if _is_device(kwargs.get("device")):
            kwargs["device"] = CPU
            if any(isinstance(value, _Pretended) for value in tree_iter((args, kwargs))):
                return func(*args, **kwargs)  # zeros_like and its kind
            made = func(*args, **kwargs)
            name = func.__name__
            if name in ("tensor", "as_tensor"):
                _copied(made, to_host=False)
            elif name not in FREE:
                _launched(name)
            return _Pretended(made)
        return func(*args, **kwargs)

    def _to(self, of: Tensor, func: Callable[..., Any], told: list[Any], kwargs: dict[str, Any]) -> Tensor:
        """`to`, `cpu` or `cuda` of a tensor: a copy, another dtype, or both."""
        target = {Tensor.cpu: CPU, Tensor.cuda: DEVICE}.get(func, kwargs.pop("device", None))
        kwargs.pop("non_blocking", None)
        for place, one in enumerate(told):
            if isinstance(one, Tensor):
                target, told[place] = one.device, one.dtype
            elif isinstance(one, str | torch.device):
                target = torch.device(one)
        rest = [one for one in told if isinstance(one, torch.dtype)] if func is Tensor.to else []
        on_device = isinstance(of, _Pretended) if target is None else _is_device(target)
        if on_device and not isinstance(of, _Pretended):
            made = of.to(*rest, **kwargs) if rest or kwargs else of
            _copied(made, to_host=False)
            return _Pretended(made.detach().clone())
        if isinstance(of, _Pretended) and not on_device:
            _copied(of, to_host=True)
            return (of.inner.to(*rest, **kwargs) if rest or kwargs else of.inner).clone()
        return of.to(*rest, **kwargs) if rest or kwargs else of


class _Event:
    """Of a stream: what is copied to the host behind it says that it is over, and otherwise it is waited for."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._reads, self._at = -1, 0.0

    def record(self) -> None:
        self._reads, self._at = _here.reads, time.perf_counter()

    def synchronize(self) -> None:
        if self._reads == _here.reads:
            _here.counts.waits += 1

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._at - self._at)


def record(steps: Steps, inputs: StepInputs, layers: tuple[int, ...], memory: object) -> None:
    """`Steps.record` where nothing can be recorded: the graph runs the forward that a device would replay."""
    output = steps._run(inputs, layers)

    def replay() -> None:
        with torch.inference_mode():
            for kept, new in zip(output, steps._run(inputs, layers), strict=True):
                kept.copy_(new)  # type: ignore[union-attr, arg-type]

    inputs.graph, inputs.output = SimpleNamespace(pool=lambda: None, replay=replay), output


def _is_device(told: Any) -> bool:
    return isinstance(told, str | torch.device) and torch.device(told).type == "cuda"


@contextmanager
def pretending() -> Iterator[Counts]:
    """Let this thread have a device; what it is asked for is counted from here on."""
    counts = _here.counts = Counts()

    _here.reads = 0

    def synchronize(device: Any = None) -> None:
        counts.waits += 1

    with (
        # Wrappers have version counters, which tensors made in inference mode have not; the operators are the same.
        patch.object(torch.inference_mode, "__enter__", lambda mode: torch.no_grad.__enter__(mode)),
        patch.object(torch.inference_mode, "__exit__", lambda mode, *why: torch.no_grad.__exit__(mode, *why)),
        patch("torch.cuda.synchronize", synchronize),
        patch("torch.cuda.Event", _Event),
        patch("torch.cuda.device_count", lambda: 1),
        patch("torch.cuda.get_device_name", lambda _: "pretended"),
        patch("torch.cuda.mem_get_info", lambda _: (1 << 34, 1 << 34)),
        patch.object(nn.Module, "to", _moved),
        patch.object(Steps, "record", record),
        # Triton launches on a real device only.
        patch("coppice.engine.modules.rotate", rotate),
        patch("coppice.engine.steps.tree_attention", tree_attention),
        patch("services.verifier.device.keyed_argmax", keyed_argmax),
        _Mode(),
    ):
        yield counts


def _moved(model: nn.Module, *told: Any) -> nn.Module:
    """`Module.to`: to the device or from it, or to another dtype."""
    target, moved = next((one for one in told if isinstance(one, str | torch.device)), None), dict[int, Any]()
    if target is None:
        return _to(model, *told)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:  # what two modules share they share there, too
                    there = tensor.detach().to(*told if tensor.is_floating_point() else (target,))
                    made = there if _is_device(target) else nn.Parameter(there, False)
                    held[name] = moved.setdefault(id(tensor), made)
    return model


_to = nn.Module.to
