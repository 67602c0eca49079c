"""The parts of a decoder block, laid out for running: everything that config.json decides is decided at load.

Plain callables over the operations of `kernels.ops`; not `nn.Module`s, no autograd. What they are made from is the
business of `loader`. Shapes: T new tokens, H hidden width, Hq and Hkv heads of queries and keys, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, overload

import torch
from torch import Tensor

from quantkit.kernels import ops
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.ops.linear import activation_quantization_of, multiply
from quantkit.kernels.types import (
    ActivationQuantization,
    Angles,
    AttentionOptions,
    HeadNorms,
    Linear,
    QuantizedActivations,
)
from quantkit.runtime.cache.kv_cache import KVCache

Rows = Tensor | QuantizedActivations


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normed x, same shape and dtype."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normed sum of x and residual, and the sum itself."""
        ...


@dataclass(slots=True, eq=False)
class RMSNorm:
    """Root mean square norm.

    Args:
        weight: (H,).
        eps, offset: see `ops.rms_norm`.
    """

    weight: Tensor
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)


@dataclass(slots=True, eq=False)
class QuantizingNorm:
    """An RMS norm before linears that all quantize their inputs alike: it does that for them, in the same launch.

    Args:
        norm: of the stream.
        quantization: of what linears read.
    """

    norm: RMSNorm
    quantization: ActivationQuantization

    def __call__(self, x: Tensor) -> Rows:
        """Normed x, quantized where there is a kernel for it."""
        return self.add(x, None)[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Rows, Tensor]:
        """Likewise the normed sum of x and residual, and the sum itself."""
        norm = self.norm
        return ops.quantized_rms_norm(
            x, residual, norm.weight, norm.eps, offset=norm.offset, quantization=self.quantization
        )


def norm_for(norm: Norm | QuantizingNorm | None, readers: Sequence[object]) -> Norm | QuantizingNorm | None:
    """The norm itself, or one that quantizes for its readers.

    Args:
        norm: None = none.
        readers: all that read what it gives.
    """
    wanted = {activation_quantization_of(reader) for reader in readers}
    quantization = wanted.pop() if len(wanted) == 1 else None
    return QuantizingNorm(norm, quantization) if isinstance(norm, RMSNorm) and quantization is not None else norm


@dataclass(slots=True, eq=False)
class LayerNorm:
    """Layer norm.

    Args:
        weight: (H,), or (heads, D) where each head has its own.
        bias: as weight, or None.
        eps: added to the variance.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dim() > 1:
            return (ops.layer_norm(x.float(), None, None, self.eps) * self.weight).to(x.dtype)
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self(total), total


class SideBySide:
    """Linears that read the same input but cannot be one product, because they are stored differently.

    Args:
        linears: their outputs are concatenated.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self.in_features = self.linears[0].in_features
        self.out_features = sum(linear.out_features for linear in self.linears)
        self.stored_bytes = sum(linear.stored_bytes for linear in self.linears)
        self.description = " | ".join(linear.description for linear in self.linears)
        wanted = {activation_quantization_of(linear) for linear in self.linears}
        self.activation_quantization = wanted.pop() if len(wanted) == 1 else None

    def __call__(self, x: Rows) -> Tensor:
        """(T, K) -> (T, sum of N)."""
        return torch.cat([multiply(linear, x) for linear in self.linears], dim=1)


@dataclass(kw_only=True, slots=True, eq=False)
class Attention:
    """Attention of one layer over its part of the KV cache.

    Args:
        layer: its number in the cache.
        qkv: (T, H) -> (T, (Hq + 2 Hkv) D), all queries first, then all keys.
        output: (T, Hq D) -> (T, H).
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
        options: what the attention kernel does besides; its norms are those that it can do.
        norms: of queries and keys before that, where it cannot.
        norm_flat: they span all heads of a token.
    """

    layer: int
    qkv: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions
    norms: tuple[Norm, Norm] | None
    norm_flat: bool
    _key_start: int = field(init=False)
    _value_start: int = field(init=False)

    def __post_init__(self) -> None:
        self._key_start = self.num_heads * self.head_dim
        self._value_start = self._key_start + self.num_kv_heads * self.head_dim

    def __call__(self, x: Rows, batch: ForwardBatch, cache: KVCache, angles: Angles | None) -> Tensor:
        """Attend.

        Args:
            x: (T, H); quantized only where `qkv` wants it.
            batch: this step.
            cache: read and written.
            angles: cosine and sine (T, R/2) of the new tokens; None = no positions.
        Returns:
            (T, H).
        """
        qkv, norms, layer = multiply(self.qkv, x), self.norms, self.layer
        query, key = qkv[:, : self._key_start], qkv[:, self._key_start : self._value_start]
        if norms is not None and self.norm_flat:
            query, key = norms[0](query), norms[1](key)
        shape = (len(x), -1, self.head_dim)
        query, key, value = query.view(shape), key.view(shape), qkv[:, self._value_start :].view(shape)
        if norms is not None and not self.norm_flat:
            query, key = norms[0](query), norms[1](key)
        attended = cache.attend(layer, query, key, value, batch, self.options, angles)
        return self.output(attended.reshape(len(x), -1))


def kernel_norms(query: Norm, key: Norm) -> HeadNorms | None:
    """Norms that attention can do together with the rotation; None where it cannot do these."""
    if not isinstance(query, RMSNorm) or not isinstance(key, RMSNorm):
        return None
    if (query.eps, query.offset) != (key.eps, key.offset) or query.weight.dim() != 1 or key.weight.dim() != 1:
        return None
    return HeadNorms(query=query.weight, key=key.weight, eps=query.eps, offset=query.offset)


@dataclass(slots=True, eq=False)
class MLP:
    """Feed-forward layer.

    Args:
        up: (T, H) -> (T, 2 I) gate and up, or (T, I) without a gate.
        down: (T, I) -> (T, H).
        activation: its name.
        gated: whether there is a gate.
    """

    is_capturable: ClassVar = True
    up: Linear
    down: Linear
    activation: str
    gated: bool
    _quantization: ActivationQuantization | None = field(init=False)

    def __post_init__(self) -> None:
        self._quantization = activation_quantization_of(self.down)

    @property
    def activation_quantization(self) -> ActivationQuantization | None:
        """How `up` rounds its inputs, if it does; see `ops.linear.activation_quantization_of`."""
        return activation_quantization_of(self.up)

    def __call__(self, x: Rows) -> Tensor:
        """(T, H) -> (T, H)."""
        opened = multiply(self.up, x)
        if not self.gated:
            return self.down(ops.activate(opened, self.activation))
        if self._quantization is None:
            return self.down(ops.gated(opened, self.activation))
        return multiply(self.down, ops.quantized_gated(opened, self.activation, self._quantization))


@dataclass(kw_only=True, slots=True, eq=False)
class Block:
    """One decoder layer: attention and MLP around the residual stream, norms where the family has them.

    What a layer adds last is handed on unadded, so that the next norm can add it in one pass.

    Args:
        attention, mlp: the two halves; the MLP may be experts.
        input_norm, attention_norm, mlp_norm, output_norm: see `models.family.Parts`.
        parallel: both halves read the same stream.
        scale: of what they add to it.
        rope: which of the model's rotary embeddings; None = no positions.
    """

    attention: Attention
    mlp: Callable[[Tensor], Tensor] | MLP
    input_norm: Norm | QuantizingNorm | None
    attention_norm: Norm | None
    mlp_norm: Norm | QuantizingNorm | None
    output_norm: Norm | None
    parallel: bool
    scale: float
    rope: int | None

    def __post_init__(self) -> None:
        shared = [self.mlp] if self.parallel and self.mlp_norm is None else []
        self.input_norm = norm_for(self.input_norm, [self.attention.qkv, *shared])
        self.mlp_norm = norm_for(self.mlp_norm, [self.mlp])

    def __call__(
        self, x: Tensor, pending: Tensor | None, batch: ForwardBatch, cache: KVCache, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            x: (T, H) residual stream.
            pending: (T, H), still to be added to it; None before the first layer.
            batch, cache, angles: see `Attention`.
        Returns:
            x and pending for what follows.
        """
        entered, x = enter(self.input_norm, x, pending)
        attended = self.attention(entered, batch, cache, angles)
        if self.attention_norm is not None:
            attended = self.attention_norm(attended)
        if self.scale != 1.0:
            attended = attended * self.scale
        if self.parallel:
            entered = entered if self.mlp_norm is None else self.mlp_norm(x)
        else:
            entered, x = enter(self.mlp_norm, x, attended)
        added = self.mlp(entered)  # type: ignore[arg-type]  # quantized only where it wants that
        if self.output_norm is not None:
            added = self.output_norm(added)
        if self.scale != 1.0:
            added = added * self.scale
        return x, (attended + added if self.parallel else added)


@overload
def enter(norm: Norm | None, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of a norm that does not quantize."""


@overload
def enter(norm: Norm | QuantizingNorm | None, x: Tensor, pending: Tensor | None) -> tuple[Rows, Tensor]:
    """Of one that may."""


def enter(norm: Norm | QuantizingNorm | None, x: Tensor, pending: Tensor | None) -> tuple[Rows, Tensor]:
    """Add what is pending to the residual stream and norm the sum.

    Args:
        norm: None = as it is.
        x: (T, H) residual stream.
        pending: (T, H) or None.
    Returns:
        the normed stream, and the stream.
    """
    if pending is None:
        return (x if norm is None else norm(x)), x
    if norm is not None:
        return norm.add(pending, x)
    total = x + pending
    return total, total
