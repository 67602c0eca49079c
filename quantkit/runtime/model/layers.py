"""The parts of a decoder block, ready to run: all choices from config.json are made at load.

They are plain callables over `kernels.ops`, not `nn.Module`s, without autograd. `weights` builds them. Shapes: T new
tokens, H hidden width, Hq and Hkv heads of queries and keys, D channels of a head.
Source of `Mixture`: Shazeer et al. 2017, Outrageously Large Neural Networks; Jiang et al. 2024 (Mixtral); Yang et al.
2024 (Qwen2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels import ops
from quantkit.kernels.reference.experts import run_each
from quantkit.kernels.types import (
    ActivationQuantization,
    Angles,
    AttentionOptions,
    ForwardBatch,
    HeadNorms,
    Linear,
    LinearFacts,
    StackedExperts,
)
from quantkit.models.family import Parts
from quantkit.runtime.cache.kv_cache import KVCache


@dataclass(slots=True, eq=False)
class RMSNorm:
    """Root mean square norm over the last dimension of x + residual; returns the normalized sum and the sum.

    Args:
        weight: (H,).
        eps, offset: see `ops.rms_norm`.
        quantization: quantization of the output if all linears that read it use the same one; the first output is then
            `QuantizedActivations`. None = the output is not quantized.
    """

    weight: Tensor
    eps: float
    offset: float
    quantization: ActivationQuantization | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ops.rms_norm(x, self.weight, self.eps, self.offset, residual, self.quantization)


@dataclass(slots=True, eq=False)
class LayerNorm:
    """Layer norm with the interface of `RMSNorm`.

    Args:
        weight: (H,), or (heads, D) if each head has its own; None = ones.
        bias: like weight, or None.
        eps: added to the variance.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        if self.weight is not None and self.weight.dim() > 1:
            # torch's layer norm has no weight per head. In float32, norm and weight are rounded only once, together.
            return (F.layer_norm(total.float(), x.shape[-1:], eps=self.eps) * self.weight).to(x.dtype), total
        return F.layer_norm(total, x.shape[-1:], self.weight, self.bias, self.eps), total


Norm = RMSNorm | LayerNorm


def norm_for(norm: Norm | None, readers: Sequence[object]) -> Norm | None:
    """Return the norm. If all readers quantize their input in the same way, return a norm that quantizes its output.

    Args:
        norm: the norm; None = no norm.
        readers: all linears that read the norm's output.
    """
    quantization = _common_quantization(readers)
    return replace(norm, quantization=quantization) if isinstance(norm, RMSNorm) and quantization is not None else norm


def _common_quantization(readers: Sequence[object]) -> ActivationQuantization | None:
    """Return the input quantization that all these linears share, or None; see `types.Linear`."""
    quantizations = {getattr(reader, "activation_quantization", None) for reader in readers}
    return quantizations.pop() if len(quantizations) == 1 else None


class SideBySide(Linear):
    """Linears that read the same input but are stored differently and so cannot be fused.

    Args:
        linears: linears whose outputs are concatenated.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        shape = (sum(linear.out_features for linear in linears), linears[0].in_features)
        num_bytes = sum(linear.stored_bytes for linear in linears)
        super().__init__(shape, num_bytes, " | ".join(linear.description for linear in linears))
        self.linears = tuple(linears)
        self.activation_quantization = _common_quantization(linears)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, sum of N)."""
        return torch.cat([linear(x) for linear in self.linears], dim=1)


@dataclass(kw_only=True, slots=True, eq=False)
class Attention:
    """Attention of one layer over its KV cache.

    Args:
        layer: layer number in the cache.
        qkv: linear (T, H) -> (T, (Hq + 2 Hkv) D), or (T, 2 (Hq + Hkv) D) with gates. Its outputs are all queries, then
            gates if any, then all keys, then all values.
        output: linear (T, Hq D) -> (T, H).
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
        options: further options of the attention kernel, including the norms that it can apply.
        norms: norms of queries and keys that the kernel cannot apply; None = there are no such norms.
        norm_flat: whether these norms span all heads of a token.
        norm_last: whether these norms follow the rotation.
        clip: bound on the absolute value of queries, keys and values. It is applied after norms over all heads and
            before norms of single heads. None = no bound.
        growth: maps positions (T,) to factors (T,) on the queries; None = no factor.
        is_gated: whether each head's output is multiplied by the sigmoid of its gate.
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
    is_gated: bool = False
    norm_last: bool = False
    clip: float | None = None
    growth: Callable[[Tensor], Tensor] | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `AnyAttention`."""
        return self.qkv, self.output

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, angles: Angles | None) -> Tensor:
        """Compute the attention of the new tokens, and store their keys and values.

        Args:
            x: (T, H); may be `QuantizedActivations` only if `qkv` accepts them.
            batch: this step.
            cache: KV cache, read and written.
            angles: cosine and sine (T, R/2) of the new tokens; None = no positions.
        Returns:
            (T, H).
        """
        norms, heads = self.norms, self.qkv(x).view(len(x), -1, self.head_dim)  # (T, Hq + 2 Hkv, D)
        counts = (self.num_heads, self.num_heads * self.is_gated, self.num_kv_heads, self.num_kv_heads)
        query, gate, key, value = heads.split(counts, 1)  # type: ignore[no-untyped-call]
        if norms is not None and self.norm_flat:
            query = norms[0](query.flatten(1))[0].view(query.shape)
            key = norms[1](key.flatten(1))[0].view(key.shape)
        if self.clip is not None:
            query, key, value = (one.clamp(-self.clip, self.clip) for one in (query, key, value))
        if self.growth is not None:
            query = query * self.growth(batch.in_text()[0])[:, None, None].to(query.dtype)
        if self.norm_last and angles is not None:
            ops.rotary_(query, key, *angles, interleaved=self.options.interleaved)
            angles = None
        if norms is not None and not self.norm_flat:
            query, key = norms[0](query)[0], norms[1](key)[0]
        attended = cache.attention[self.layer]((query, key, value), batch, self.options, angles)
        return self.output((attended * gate.sigmoid() if self.is_gated else attended).reshape(len(x), -1))


def kernel_norms(query: Norm, key: Norm) -> HeadNorms | None:
    """Return both norms in the form in which the attention kernel applies them before the rotation.

    Return None if the kernel cannot apply them.
    """
    if not isinstance(query, RMSNorm) or not isinstance(key, RMSNorm):
        return None
    if (query.eps, query.offset) != (key.eps, key.offset) or query.weight.dim() != 1 or key.weight.dim() != 1:
        return None
    return HeadNorms(query=query.weight, key=key.weight, eps=query.eps, offset=query.offset)


def query_rows(parts: Parts, num_heads: int, head_dim: int) -> Tensor | None:
    """Return indices (N,) that put the rows of the first projection in the order that `Attention` needs.

    Return None if the rows are stored in that order.
    """
    if parts.qkv_blocks:  # queries, values, keys
        blocks = torch.arange(3 * num_heads * head_dim).view(parts.qkv_blocks, 3, -1)
        return blocks[:, [0, 2, 1]].transpose(0, 1).reshape(-1)
    if not parts.qkv_by_head and not parts.gated_query:
        return None
    turns = 3 if parts.qkv_by_head else 2
    return torch.arange(turns * num_heads * head_dim).view(num_heads, turns, head_dim).transpose(0, 1).reshape(-1)


@dataclass(slots=True, eq=False)
class MLP:
    """Feed-forward layer.

    Args:
        up: linear (T, H) -> (T, 2 I) that computes gate and up, or (T, H) -> (T, I) without a gate.
        down: linear (T, I) -> (T, H).
        activation: name of the activation.
        gated: whether there is a gate.
        curve: an activation with parameters, used instead of the named one.
    """

    is_capturable: ClassVar = True
    up: Linear
    down: Linear
    activation: str
    gated: bool
    curve: Callable[[Tensor], Tensor] | None = None

    @property
    def activation_quantization(self) -> ActivationQuantization | None:
        """Quantization that `up` uses for its inputs."""
        return self.up.activation_quantization

    def __call__(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H)."""
        if self.curve is not None:
            return self.down(self.curve(self.up(x)))
        if not self.gated:
            return self.down(ops.activate(self.up(x), self.activation))
        return self.down(ops.gated_linear(self.up, x, self.activation, self.down.activation_quantization))


@dataclass(kw_only=True, slots=True, eq=False)
class Mixture:
    """Mixture of experts in place of an MLP: a router chooses k of E experts per token; weighted outputs are added.

    `reference.experts` defines the computation.

    Args:
        router: linear (T, H) -> (T, E) that computes the scores of the experts.
        experts: one MLP per expert, or all experts as one module.
        choose: function such as `route` that maps scores (T, E) to weights and indices of the chosen experts.
        shared: an MLP applied to every token, or None.
        shared_gate: linear (T, H) -> (T, 1). The sigmoid of its output is the factor on the output of `shared`.
            None = no factor.
        table: (V, k) int64, the experts of each token id; `choose` then computes only their weights. None = `choose`
            also chooses the experts.
    """

    router: Linear
    experts: tuple[MLP, ...] | StackedExperts
    choose: Callable[..., tuple[Tensor, Tensor]]
    shared: MLP | None
    shared_gate: Linear | None
    table: Tensor | None = None

    @property
    def linears(self) -> tuple[LinearFacts, ...]:
        """The linears of the experts, two per expert, without those of the shared expert."""
        if isinstance(self.experts, tuple):
            return tuple(linear for expert in self.experts for linear in (expert.up, expert.down))
        return self.experts.linears

    @property
    def is_capturable(self) -> bool:
        """Whether calls can be captured as a CUDA graph: only if the device chooses the experts."""
        return not isinstance(self.experts, tuple)

    def __call__(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Compute (T, H) -> (T, H); only `table` needs the token ids (T,)."""
        choose = self.choose
        if self.table is not None and token_ids is not None:
            choose = partial(choose, chosen=self.table[token_ids])
        shared = None if self.shared is None else self.shared(x)
        score = None if self.shared_gate is None else self.shared_gate(x)
        if not isinstance(self.experts, tuple):
            return self.experts(x, self.router(x), shared, score, choose)
        if shared is not None and score is not None:
            shared = shared * score.sigmoid()
        weights, chosen = choose(self.router(x))
        return run_each(x, chosen, weights, self.experts, torch.zeros_like(x) if shared is None else shared)


class AnyAttention(Protocol):
    """Attention of a block: `Attention`, or a layer that replaces it."""

    @property
    def qkv(self) -> Linear:
        """The linear that reads the layer's input."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linears of the layer."""

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, angles: Angles | None) -> Tensor:
        """See `Attention`."""


@dataclass(kw_only=True, slots=True, eq=False)
class Block:
    """One decoder layer: attention and MLP around the residual stream, with the norms that the family has.

    A layer returns its last addition to the stream separately, so that the next norm can add it in the same launch.

    Args:
        attention, mlp: the two halves; the MLP may be a mixture of experts. None = the layer has only the other half.
        input_norm, attention_norm, mlp_norm, output_norm: see `models.family.Parts`.
        parallel: whether both halves read the residual stream at the layer's input; False = the MLP follows attention.
        scale: factor on additions to the stream.
        rope: index of the model's rotary embedding; None = no positions.
    """

    attention: AnyAttention | None
    mlp: Callable[[Tensor], Tensor] | None
    input_norm: Norm | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    output_norm: Norm | None
    parallel: bool
    scale: float
    rope: int | None

    def __post_init__(self) -> None:
        # The input norm quantizes only if all its readers do. A parallel MLP without its own norm is one of them.
        shared = [self.mlp] if self.attention is None or (self.parallel and self.mlp_norm is None) else []
        mixing = [] if self.attention is None else [self.attention.qkv]
        self.input_norm = norm_for(self.input_norm, [*mixing, *shared])
        self.mlp_norm = norm_for(self.mlp_norm, [self.mlp])

    def __call__(
        self, x: Tensor, pending: Tensor | None, batch: ForwardBatch, cache: KVCache, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            x: (T, H) residual stream.
            pending: (T, H), still to be added to x; None before the first layer.
            batch, cache, angles: see `Attention`.
        Returns:
            x and pending, to pass to the next layer.
        """
        entered, x = add_and_norm(self.input_norm, x, pending)
        if self.attention is None or self.mlp is None:
            return x, self._half(entered, batch, cache, angles)
        attended = self.attention(entered, batch, cache, angles)
        if self.attention_norm is not None:
            attended, _ = self.attention_norm(attended)
        if self.scale != 1.0:
            attended = attended * self.scale
        if self.parallel:
            # `x` is still the stream that attention read: attention's output is added only together with the MLP's.
            entered = entered if self.mlp_norm is None else self.mlp_norm(x)[0]
        else:
            entered, x = add_and_norm(self.mlp_norm, x, attended)
        added = self.mlp(entered)
        if self.output_norm is not None:
            added, _ = self.output_norm(added)
        if self.scale != 1.0:
            added = added * self.scale
        return x, (attended + added if self.parallel else added)

    def _half(self, entered: Tensor, batch: ForwardBatch, cache: KVCache, angles: Angles | None) -> Tensor:
        """Return the output of a layer that has only one half."""
        if self.attention is not None:
            return self.attention(entered, batch, cache, angles)
        assert self.mlp is not None, "a layer has at least one half"
        return self.mlp(entered)


def add_and_norm(norm: Norm | None, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the previous block's output to the residual stream, and normalize the sum.

    Args:
        norm: the norm; None = no norm.
        x: (T, H) residual stream.
        pending: (T, H) output that is not yet in the stream; None = nothing to add.
    Returns:
        The normalized sum, and the sum, both (T, H).
    """
    if norm is not None:
        return norm(x) if pending is None else norm(pending, x)
    total = x if pending is None else x + pending
    return total, total
