"""The parts of a decoder block, laid out for running: everything that config.json decides is decided at load.

Plain callables over the operations of `kernels.ops`; not `nn.Module`s, no autograd. What they are made from is the
business of `loader`. Shapes: T new tokens, H hidden width, Hq and Hkv heads of queries and keys, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from quantkit.kernels import ops
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.ops.linear import activation_quantization_of, multiply
from quantkit.kernels.types import ActivationQuantization, Angles, HeadNorms, Linear, QuantizedActivations
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


class RMSNorm:
    """Root mean square norm.

    Args:
        weight: (H,).
        eps, offset: see `ops.rms_norm`.
    """

    __slots__ = ("eps", "offset", "weight")

    def __init__(self, weight: Tensor, eps: float, offset: float) -> None:
        self.weight, self.eps, self.offset = weight, eps, offset

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return ops.rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm`."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)


class RoundingNorm:
    """An RMS norm before linears that all round their inputs alike: it does that for them, in the same launch.

    Args:
        norm: of the stream.
        rounding: of what linears read.
    """

    __slots__ = ("_norm", "_rounding")

    def __init__(self, norm: RMSNorm, rounding: ActivationQuantization) -> None:
        self._norm, self._rounding = norm, rounding

    def __call__(self, x: Tensor) -> Rows:
        """Normed x, rounded where there is a kernel for it."""
        return self._apply(x, None)[0]

    def add(self, x: Tensor, residual: Tensor) -> tuple[Rows, Tensor]:
        """Likewise the normed sum of x and residual, and the sum itself."""
        return self._apply(x, residual)

    def _apply(self, x: Tensor, residual: Tensor | None) -> tuple[Rows, Tensor]:
        norm, rounding = self._norm, self._rounding
        return ops.quantized_rms_norm(x, residual, norm.weight, norm.eps, offset=norm.offset, quantization=rounding)


def norm_for(norm: Norm | None, readers: Sequence[object]) -> Norm | RoundingNorm | None:
    """The norm itself, or one that rounds for its readers.

    Args:
        norm: None = none.
        readers: all that read what it gives.
    """
    wanted = {activation_quantization_of(reader) for reader in readers}
    rounding = wanted.pop() if len(wanted) == 1 else None
    return RoundingNorm(norm, rounding) if isinstance(norm, RMSNorm) and rounding is not None else norm


class LayerNorm:
    """Layer norm.

    Args:
        weight: (H,), or (heads, D) where each head has its own.
        bias: as weight, or None.
        eps: added to the variance.
    """

    __slots__ = ("_by_head", "bias", "eps", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps
        self._by_head = weight.dim() > 1

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        if self._by_head:
            return (ops.layer_norm(x.float(), None, None, self.eps) * self.weight).to(x.dtype)
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm`."""
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


class Attention:
    """Attention of one layer over its part of the KV cache.

    Args:
        layer: its number in the cache.
        qkv: (T, H) -> (T, (Hq + 2 Hkv) D), all queries first, then all keys.
        output: (T, Hq D) -> (T, H).
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
        scale, window, softcap: see `KVCache.attend`.
        query_norm, key_norm: before the rotation.
        norm_flat: they span all heads of a token.
        interleaved: neighbouring channels are rotated together.
    """

    __slots__ = (
        *("_head_dim", "_interleaved", "_key_end", "_key_norm", "_layer", "_norm_flat", "_norms", "_query_end"),
        *("_query_norm", "_scale", "_softcap", "_window", "output", "qkv"),
    )

    def __init__(
        self,
        *,
        layer: int,
        qkv: Linear,
        output: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        norm_flat: bool,
        interleaved: bool,
    ) -> None:
        self.qkv, self.output = qkv, output
        self._layer, self._head_dim = layer, head_dim
        self._query_end = num_heads * head_dim
        self._key_end = self._query_end + num_kv_heads * head_dim
        self._scale, self._window, self._softcap = scale, window, softcap
        self._norms = None if norm_flat else _head_norms(query_norm, key_norm)
        self._query_norm, self._key_norm = (query_norm, key_norm) if self._norms is None else (None, None)
        self._norm_flat = norm_flat
        self._interleaved = interleaved

    def __call__(self, x: Rows, batch: ForwardBatch, cache: KVCache, angles: Angles | None) -> Tensor:
        """Attend.

        Args:
            x: (T, H); rounded only where `qkv` wants it.
            batch: this step.
            cache: read and written.
            angles: cosine and sine (T, R/2) of the new tokens; None = no positions.
        Returns:
            (T, H).
        """
        qkv = multiply(self.qkv, x)
        query, key, value = qkv[:, : self._query_end], qkv[:, self._query_end : self._key_end], qkv[:, self._key_end :]
        if self._norm_flat and self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(query), self._key_norm(key)
        tokens, width = len(x), self._head_dim
        query, key = query.view(tokens, -1, width), key.view(tokens, -1, width)
        if not self._norm_flat and self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(query), self._key_norm(key)
        attended = cache.attend(
            self._layer,
            query,
            key,
            value.view(tokens, -1, width),
            batch,
            scale=self._scale,
            window=self._window,
            softcap=self._softcap,
            angles=angles,
            interleaved=self._interleaved,
            norms=self._norms,
        )
        return self.output(attended.reshape(tokens, -1))


def _head_norms(query: Norm | None, key: Norm | None) -> HeadNorms | None:
    """Norms that attention can do together with the rotation; None where there are none, or others."""
    if not isinstance(query, RMSNorm) or not isinstance(key, RMSNorm):
        return None
    if (query.eps, query.offset) != (key.eps, key.offset) or query.weight.dim() != 1 or key.weight.dim() != 1:
        return None
    return HeadNorms(query=query.weight, key=key.weight, eps=query.eps, offset=query.offset)


class MLP:
    """Feed-forward layer.

    Args:
        up: (T, H) -> (T, 2 I) gate and up, or (T, I) without a gate.
        down: (T, I) -> (T, H).
        activation: its name.
        gated: whether there is a gate.
    """

    __slots__ = ("_activation", "_gated", "down", "up")
    is_capturable = True

    def __init__(self, up: Linear, down: Linear, activation: str, gated: bool) -> None:
        self.up, self.down, self._activation, self._gated = up, down, activation, gated

    @property
    def activation_quantization(self) -> ActivationQuantization | None:
        """How `up` rounds its inputs, if it does; see `ops.linear.activation_quantization_of`."""
        return activation_quantization_of(self.up)

    def __call__(self, x: Rows) -> Tensor:
        """(T, H) -> (T, H)."""
        opened, rounding = multiply(self.up, x), activation_quantization_of(self.down)
        if not self._gated:
            return self.down(ops.activate(opened, self._activation))
        if rounding is None:
            return self.down(ops.gated(opened, self._activation))
        return multiply(self.down, ops.quantized_gated(opened, self._activation, rounding))


class Block:
    """One decoder layer: attention and MLP around the residual stream, norms where the family has them.

    What a layer adds last is handed on unadded, so that the next norm can add it in one pass.

    Args:
        attention, mlp: the two halves; the MLP may be experts.
        input_norm, attention_norm, mlp_norm, output_norm: see `architectures.Parts`.
        parallel: both halves read the same stream.
        scale: of what they add to it.
        rope: which of the model's rotary embeddings; None = no positions.
    """

    __slots__ = (
        *("_attention_norm", "_input_norm", "_mlp_norm", "_output_norm", "_parallel", "_scale"),
        *("attention", "mlp", "rope"),
    )

    def __init__(
        self,
        *,
        attention: Attention,
        mlp: Callable[[Tensor], Tensor] | MLP,
        input_norm: Norm | None,
        attention_norm: Norm | None,
        mlp_norm: Norm | None,
        output_norm: Norm | None,
        parallel: bool,
        scale: float,
        rope: int | None,
    ) -> None:
        self.attention, self.mlp, self.rope = attention, mlp, rope
        shared = [mlp] if parallel and mlp_norm is None else []
        self._input_norm, self._attention_norm = norm_for(input_norm, [attention.qkv, *shared]), attention_norm
        self._mlp_norm, self._output_norm = norm_for(mlp_norm, [mlp]), output_norm
        self._parallel, self._scale = parallel, scale

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
        entered, x = enter(self._input_norm, x, pending)
        attended = self.attention(entered, batch, cache, angles)
        if self._attention_norm is not None:
            attended = self._attention_norm(attended)
        if self._scale != 1.0:
            attended = attended * self._scale
        if self._parallel:
            entered = entered if self._mlp_norm is None else self._mlp_norm(x)
        else:
            entered, x = enter(self._mlp_norm, x, attended)
        added = self.mlp(entered)  # type: ignore[arg-type]  # rounded rows only where it wants them
        if self._output_norm is not None:
            added = self._output_norm(added)
        if self._scale != 1.0:
            added = added * self._scale
        return x, (attended + added if self._parallel else added)


@overload
def enter(norm: Norm | None, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of a norm that does not round."""


@overload
def enter(norm: Norm | RoundingNorm | None, x: Tensor, pending: Tensor | None) -> tuple[Rows, Tensor]:
    """Of one that may."""


def enter(norm: Norm | RoundingNorm | None, x: Tensor, pending: Tensor | None) -> tuple[Rows, Tensor]:
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
