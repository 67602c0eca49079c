"""Operations of a decoder block in plain torch, on any device and in any dtype; faster versions must agree with them.

Each operation computes in float32 and rounds once, to the dtype of its input. A linear multiplies by the dequantized
weight.
Shapes: T tokens, N outputs, K inputs or features, H heads, D channels of a head, R channels that rotate, I width of the
feed-forward layer.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.types import Linear, nbytes
from quantkit.numerics.scheme import ActivationScheme


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return total / rms(total) * (weight + offset) over the last dimension, and the total; see `ops.rms_norm`."""
    total = x if residual is None else x + residual
    single = total.float()
    scaled = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + eps)
    return (scaled * (weight.float() + offset if offset else weight)).to(x.dtype), total


def rotary_(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of channels by the position's angles, in place; see `ops.rotary_`."""
    for states in (query, key):
        _rotate_(states, cos.unsqueeze(1), sin.unsqueeze(1), interleaved)
    return query, key


def _rotate_(states: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    half = cos.shape[-1]
    rotated = states[..., : 2 * half]  # (T, H, R)
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    # Both halves are computed before one is written, because each needs the other half's old values.
    turned = first * cos - second * sin, second * cos + first * sin
    first.copy_(turned[0])
    second.copy_(turned[1])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "linear": lambda x: x,
}
"""Activation functions by their name in transformers configs."""


XIELU = "xielu"
"""Name of the activation with learned parameters, see `xielu`."""


def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor | float = 0.5, eps: Tensor | float = -1e-6
) -> Tensor:
    """Compute xIELU: a parabola above zero, an exponential below; the slope at zero is beta.

    Args:
        x: (T, I); not modified.
        alpha_p, alpha_n: (1,), curvatures above and below zero, before softplus.
        beta: slope at zero.
        eps: upper limit of the exponential's argument.
    Source: Huang 2024, Deriving Activation Functions Using Integration.
    """
    single = x.float()
    above, below = F.softplus(alpha_p.float()), beta + F.softplus(alpha_n.float())
    bent = torch.where(single > 0, above * single * single, (torch.expm1(single.clamp(max=eps)) - single) * below)
    return (bent + beta * single).to(x.dtype)


CLAMPED_SWIGLU = "clamped_swiglu"
LIMITED_SWIGLU = "limited_swiglu"
"""Names of gated activations with clamped inputs, see `clamped_swiglu`; the second name is DeepSeek-V4's."""


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, offset: float = 1.0) -> Tensor:
    """Compute gate * sigmoid(alpha * gate) * (up + offset) with clamped gate and up.

    Args:
        gate_up: (T, 2I), gate first; not modified.
        alpha: factor in the sigmoid.
        limit: gate is clamped to at most `limit`, and up to -limit..limit.
        offset: added to up.
    Source: OpenAI 2025, gpt-oss.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + offset)).to(gate_up.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply an activation without a gate.

    Args:
        x: any shape; not modified.
        activation: a key of `ACTIVATIONS`.
    """
    return ACTIVATIONS[activation](x.float()).to(x.dtype)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up; see `ops.gated`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate.float()) * up).to(gate_up.dtype)


class DenseLinear(Linear):
    """Reference linear: the dequantized weight and torch's GEMM, on any device, in any dtype.

    Args:
        weight: (N, K) in the dtype of the computation; kept, not copied.
        bias: (N,) or None.
        description: text for tables.
    """

    def __init__(self, weight: Tensor, *, bias: Tensor | None, description: str) -> None:
        super().__init__(weight.shape, nbytes(weight, bias), description)
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


def quantize_tokens(x: Tensor, scheme: ActivationScheme) -> tuple[Tensor, Tensor]:
    """Return the codes and scales with which `fake_quantize_inputs` computes, one scale per token.

    Args:
        x: (T, K) float; not modified.
        scheme: number type.
    Returns:
        codes: (T, K) float32; a row that holds a NaN or an infinity has codes 0.
        scale: (T, 1) float32; NaN for such a row, so that its outputs are NaN.
    """
    kind = scheme.dtype
    single = x.float()
    scale = single.abs().amax(dim=-1, keepdim=True) / kind.half_range
    finite = scale.isfinite()
    # For a row of zeros, 0 / 0 would be NaN.
    scale = torch.where(finite & (scale == 0), torch.finfo(torch.float32).eps, scale)
    codes = torch.where(finite, single / scale, 0.0).clamp_(kind.minimum, kind.maximum)
    codes = codes.round_() if kind.kind == "int" else codes.to(kind.storage).float()
    return codes, torch.where(finite, scale, torch.nan)
