"""A GPU that is not there: tensors that say they are on it, lie on the CPU, and refuse what a GPU's would refuse.

Code that forgets to move a tensor works on the CPU and fails on a GPU; here it fails too. Not pretended: kernels,
memory, speed, and the rounding of a GPU's products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
# What may be given tensors of both places: copies, and indices, which are read on the host.
MIXING = {"copy_", "__getitem__", "__setitem__", "index_put_", "to", "type_as", "set_data", "__set__"}
ON_HOST = {"numpy", "__array__"}


class Pretended(torch.Tensor):
    """A tensor on the GPU that is not there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Pretended:
        """A copy in the same place."""
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        return memo.setdefault(id(self), _as_parameter(copied) if isinstance(self, torch.nn.Parameter) else copied)


class _Factories(TorchFunctionMode):
    """Functions that make tensors know the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        return _call(func, args, kwargs or {})


def _as_parameter(value: Pretended) -> Any:
    return torch.nn.Parameter(value, requires_grad=value.requires_grad)


def _is_there(value: Any) -> bool:
    return isinstance(value, Pretended)


def _on_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    owner = getattr(func, "__self__", None)
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    there = [value for value in tensors if _is_there(value)]
    if name == "__get__" and there:
        told = {torch.Tensor.device: GPU, torch.Tensor.is_cuda: True, torch.Tensor.is_cpu: False}
        if owner in told:
            return told[owner]
    if there and name in ON_HOST:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if name == "_parse_to":  # only reads what a module's `to` was given
        return func(*args, **kwargs)
    if name == "_has_compatible_shallow_copy_type" and len(there) == 1:
        return False
    if there and name not in MIXING:
        stray = [value for value in tensors if not _is_there(value) and value.dim() > 0 and value.numel()]
        if stray:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")
    moved = _target(name, args, kwargs, bool(there))
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*_without_device(args), **_without_device(kwargs))
    return tree_map(lambda value: _placed(value, moved), found)


def _target(name: str, args: Any, kwargs: Any, there: bool) -> bool:
    """Whether a result is on the GPU."""
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    wanted += [kwargs["device"]] if kwargs.get("device") is not None else []
    wanted += [value for value in args[1:2] if name == "to" and isinstance(value, str)]
    if name == "to" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return _is_there(args[1])
    if name in ("cpu", "tolist"):
        return False
    return _on_gpu(wanted[-1]) if wanted else there


def _without_device(values: Any) -> Any:
    return tree_map(
        lambda value: torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value, values
    )


def _placed(value: Any, on_gpu: bool) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_meta or _is_there(value) == on_gpu:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Pretended if on_gpu else torch.Tensor)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """While open, `torch.device("cuda", 0)` can be given to functions of torch."""
    with _Factories():
        yield GPU
