"""Small operations with the C kernels: float32 and bf16 on the CPU, dense rows.

`kernels.ops` defines the operations. A function returns None (`rotary_`: False) if no kernel supports the tensors;
`kernels.ops` then runs the reference.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels import cpu

STATE_TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The number that stands for each activation dtype in `activations.h`."""

GATES = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_fast": 2, "gelu_pytorch_tanh": 2}
"""The number that stands for each gate activation in `ops.c`."""


@functools.cache
def _functions() -> Any:
    """Return the C functions by name, looked up once because a lookup costs time; None without a library."""
    if cpu.library() is None:
        return None
    return SimpleNamespace(
        rms_norm=cpu.function("qk_rms_norm", "pppnnnnnddii"),
        add_rms_norm=cpu.function("qk_add_rms_norm", "pppppnnddii"),
        rotary=cpu.function("qk_rotary", "ppppnnnnnnnii"),
        gated=cpu.function("qk_gated", "ppnniii"),
    )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """See `ops.rms_norm`; return None if no kernel supports the tensors."""
    call, kind = _functions(), STATE_TYPES.get(x.dtype)
    if call is None or kind is None or not x.is_cpu or weight.dtype != x.dtype:
        return None
    width, is_dense = x.shape[-1], x.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    constants = eps, offset, kind, torch.get_num_threads()
    if residual is not None:
        if not is_dense or not residual.is_contiguous() or residual.dtype != x.dtype:
            return None
        total = torch.empty_like(x)
        call.add_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), x.numel() // width,
            width, *constants,
        )  # fmt: skip
        return out, total
    if not is_dense and (x.dim() != 3 or x.stride(2) != 1):
        return None
    # Queries and keys are slices of one tensor, so the stride between tokens is that of the tensor.
    rows = (1, x.numel() // width, width, 0, width) if is_dense else (*x.shape, x.stride(0), x.stride(1))
    call.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *rows, *constants)
    return out, x


def rotary_(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> bool:
    """See `ops.rotary_`; return False if no kernel supports the tensors."""
    call, kind = _functions(), STATE_TYPES.get(query.dtype)
    if interleaved or call is None or kind is None or not query.is_cpu or key.dtype != query.dtype:
        return False
    head_dim = query.shape[2]
    # The heads of a token must lie one after another.
    if not query.stride()[1:] == key.stride()[1:] == (head_dim, 1):
        return False
    if cos.dtype != torch.float32 or not (cos.is_contiguous() and sin.is_contiguous()):
        return False
    call.rotary(
        query.data_ptr(), key.data_ptr(), cos.data_ptr(), sin.data_ptr(), query.shape[0], query.shape[1], key.shape[1],
        head_dim, query.stride(0), key.stride(0), cos.shape[1], kind, torch.get_num_threads(),
    )  # fmt: skip
    return True


def gated(gate_up: Tensor, activation: str) -> Tensor | None:
    """See `ops.gated`; return None if no kernel supports the tensors."""
    call, kind, gate = _functions(), STATE_TYPES.get(gate_up.dtype), GATES.get(activation)
    if call is None or kind is None or gate is None or not gate_up.is_cpu or not gate_up.is_contiguous():
        return None
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    rows = gate_up.numel() // max(1, 2 * width)
    call.gated(gate_up.data_ptr(), out.data_ptr(), rows, width, gate, kind, torch.get_num_threads())
    return out
