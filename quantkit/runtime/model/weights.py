"""From tensors on disk to the parts of a model: read, decode, fuse, lay out, one group of linears at a time.

Nothing is kept but what the parts hold, so beside the finished ones there is never more than one group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError
from quantkit.formats.base import Format
from quantkit.kernels.ops.experts import can_stack, stack
from quantkit.kernels.ops.linear import build_linear, join
from quantkit.kernels.types import AttentionOptions, Linear, StackedExperts
from quantkit.models.layer_tensors import norm_names, per_head
from quantkit.models.rope import RopeConfig
from quantkit.numerics.scheme import ActivationScheme, Scheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.experts import Mixture
from quantkit.runtime.model.layers import MLP, Attention, Block, LayerNorm, Norm, RMSNorm, SideBySide, kernel_norms
from quantkit.runtime.model.manifest import is_quantized, is_stacked, local_names

Weight = Tensor | QuantizedTensor


@dataclass(kw_only=True, slots=True)
class Weights:
    """What parts are made from. *Mutable*: counts bytes.

    Args:
        reader: of the checkpoint.
        config: the model.
        format, scheme: how its quantized linears are stored; both None when it has none.
        dtype, device: of the computation.
        num_bytes: of all parts made so far.
        stored_bytes: of those that one decode step reads.
        notes: what was decided on the way and a user should know.
    """

    reader: CheckpointReader
    config: ModelConfig
    format: Format | None
    scheme: Scheme | None
    dtype: torch.dtype
    device: torch.device
    num_bytes: int = 0
    stored_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    _local: dict[str, set[str]] = field(init=False)

    def __post_init__(self) -> None:
        self._local = local_names(self.reader)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that is never quantized, in the model's dtype unless another is given."""
        value = self.reader.tensor(name).to(self.device, dtype or self.dtype)
        self.num_bytes += value.nbytes
        return value

    def norm(self, name: str) -> Norm:
        """A norm by full module name."""
        weight, stored = self.tensor(f"{name}.weight"), f"{name}.bias"
        bias = self.tensor(stored) if stored in self.reader else None
        return self._norm(weight, bias)

    def _norm(self, weight: Tensor, bias: Tensor | None) -> Norm:
        self.stored_bytes += weight.nbytes
        if self.config.family.norm == "layer":
            return LayerNorm(weight, bias, self.config.norm_eps)
        return RMSNorm(weight, self.config.norm_eps, self.config.norm_offset)

    def head_norm(self, name: str, prefix: str, num_heads: int) -> Norm:
        """A norm of queries or keys; where each head has a module of its own, all of them as one."""
        if "{head}" not in name:
            return self.norm(prefix + name)
        modules = per_head(name, num_heads)
        weight = torch.stack([self.tensor(f"{prefix}{module}.weight") for module in modules])
        return self._norm(weight, None)

    def linear(self, names: Sequence[str], order: Tensor | None = None, read_share: float = 1.0) -> Linear:
        """One linear out of modules that read the same input: their outputs one after another.

        Args:
            names: full module names.
            order: (N,) rows of the result, where it is not that of the checkpoint.
            read_share: how much of it a decode step reads, for experts.
        """
        stored = [self._read(name) for name in names]
        weights, schemes = [weight for weight, _ in stored], [activation for _, activation in stored]
        biases = self._biases(names, weights)
        del stored
        joined = weights[0] if len(weights) == 1 else _join(weights, schemes)
        if joined is None:
            each: Sequence[Tensor | None] = biases or [None] * len(names)
            parts = zip(weights, each, schemes, strict=True)
            result: Linear = SideBySide([self._linear(*part) for part in parts])
        else:
            weights.clear()
            bias = None if biases is None else torch.cat(biases)
            if order is not None:
                joined, bias = _take_rows(joined, order), None if bias is None else bias[order]
            result = self._linear(joined, bias, schemes[0])
        self._count(result, read_share)
        return result

    def expert(self, name: str, number: int, read_share: float) -> Linear:
        """A linear of one expert, out of the tensor that holds those of all."""
        result = self._linear(self.reader.rows(name, number, number + 1)[0].to(self.device), None, None)
        self._count(result, read_share)
        return result

    def _count(self, linear: Linear, read_share: float) -> None:
        self.num_bytes += linear.stored_bytes
        self.stored_bytes += round(linear.stored_bytes * read_share)

    def _linear(self, weight: Weight, bias: Tensor | None, activation: ActivationScheme | None) -> Linear:
        return build_linear(weight, bias=bias, activation=activation, dtype=self.dtype, device=self.device)

    def _read(self, name: str) -> tuple[Weight, ActivationScheme | None]:
        local = self._local[name]
        if not is_quantized(name, local, self.scheme):
            return self.reader.tensor(f"{name}.weight").to(self.device), None
        assert self.scheme is not None and self.format is not None
        linear = self.scheme.find(name)
        assert linear is not None
        tensors = {item: self.reader.tensor(f"{name}.{item}") for item in local if item != "bias"}
        try:
            weight = self.format.decode(tensors, linear)
        except CheckpointError as error:
            raise CheckpointError(f"{self.reader.path}: {name}: {error}") from None
        return weight, linear.activation

    def _biases(self, names: Sequence[str], weights: Sequence[Weight]) -> list[Tensor] | None:
        """Bias of each module, zero where only others have one; None when none has."""
        stored = [f"{name}.bias" for name in names]
        if not any(name in self.reader for name in stored):
            return None
        return [
            self.reader.tensor(name).to(self.device, self.dtype)
            if name in self.reader
            else torch.zeros(weight.shape[0], dtype=self.dtype, device=self.device)
            for name, weight in zip(stored, weights, strict=True)
        ]


def _join(weights: Sequence[Weight], schemes: Sequence[ActivationScheme | None]) -> Weight | None:
    if any(scheme != schemes[0] for scheme in schemes):
        return None
    return join(weights)  # type: ignore[arg-type]  # a mixed list gives None


def _take_rows(weight: Weight, order: Tensor) -> Weight:
    if isinstance(weight, Tensor):
        return weight[order]
    order = order.to(weight.codes.device)  # codes are laid out first and moved then
    return dataclasses.replace(
        weight,
        codes=weight.codes.view(torch.uint8)[order].view(weight.codes.dtype),
        scale=weight.scale[order],
        zero_point=None if weight.zero_point is None else weight.zero_point[order],
    )


def build_block(weights: Weights, index: int, ropes: Sequence[RopeConfig]) -> Block:
    """One decoder layer.

    Args:
        weights: where it comes from; its byte counts grow.
        index: number of the layer.
        ropes: rotary embeddings of the model.
    """
    config = weights.config
    prefix, layer = f"{config.family.layers}.{index}.", config.layers[index]
    norms = [None if name is None else weights.norm(prefix + name) for name in norm_names(config)]
    mlp: Callable[[Tensor], Tensor]
    if layer.has_experts:
        mlp = _build_mixture(weights, prefix)
    else:
        parts = config.family.parts
        mlp = _build_mlp(weights, parts.up, parts.down, prefix, parts.gated)
    return Block(
        attention=_build_attention(weights, index, prefix),
        mlp=mlp,
        input_norm=norms[0],
        attention_norm=norms[1],
        mlp_norm=norms[2],
        output_norm=norms[3],
        parallel=config.parallel,
        scale=config.residual_scale,
        rope=None if layer.rope is None else ropes.index(layer.rope),
    )


def _build_attention(weights: Weights, index: int, prefix: str) -> Attention:
    config, layer = weights.config, weights.config.layers[index]
    parts, norm = config.family.parts, config.family.qk_norm
    flat, norms, fused = norm is not None and norm.over == "projection", None, None
    if norm is not None and config.qk_norm:
        norms = (
            weights.head_norm(norm.query, prefix, config.num_heads),
            weights.head_norm(norm.key, prefix, config.num_kv_heads),
        )
        fused = None if flat else kernel_norms(*norms)
    order = None
    if parts.qkv_by_head:
        rows = torch.arange(3 * config.num_heads * config.head_dim, device=weights.device)
        order = rows.view(config.num_heads, 3, config.head_dim).transpose(0, 1).reshape(-1)
    return Attention(
        layer=index,
        qkv=weights.linear([prefix + name for name in parts.qkv], order),
        output=weights.linear([prefix + parts.output]),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        options=AttentionOptions(
            scale=config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
            interleaved=layer.rope is not None and layer.rope.interleaved,
            norms=fused,
        ),
        norms=None if fused else norms,
        norm_flat=flat,
    )


def _build_mlp(
    weights: Weights, up: Sequence[str], down: str, prefix: str, gated: bool = True, read_share: float = 1.0
) -> MLP:
    return MLP(
        weights.linear([prefix + name for name in up], read_share=read_share),
        weights.linear([prefix + down], read_share=read_share),
        weights.config.activation,
        gated,
    )


def _build_mixture(weights: Weights, prefix: str) -> Mixture:
    config, data = weights.config.experts, weights.config.family.experts
    assert config is not None and data is not None
    shared = shared_gate = None
    if config.shared_width is not None and data.shared_down is not None:
        shared = _build_mlp(weights, data.shared_up, data.shared_down, prefix)
    if data.shared_gate is not None:
        shared_gate = weights.linear([prefix + data.shared_gate])
    return Mixture(
        router=weights.linear([prefix + data.router]),
        experts=_stack(weights, prefix) or tuple(_build_experts(weights, prefix)),
        num_chosen=config.num_chosen,
        normalize=config.normalize,
        shared=shared,
        shared_gate=shared_gate,
    )


def _build_experts(weights: Weights, prefix: str) -> Iterator[MLP]:
    """The experts of a layer, one after another."""
    config, data = weights.config.experts, weights.config.family.experts
    assert config is not None and data is not None
    share, activation = config.num_chosen / config.num_experts, weights.config.activation
    stacked = is_stacked(weights.config, prefix, weights.reader)
    for number in range(config.num_experts):
        if stacked:
            up, down = (weights.expert(prefix + name, number, share) for name in (data.stacked_up, data.stacked_down))
            yield MLP(up, down, activation, True)
        else:
            names = [name.format(expert=number) for name in data.up]
            yield _build_mlp(weights, names, data.down.format(expert=number), prefix, read_share=share)


def _stack(weights: Weights, prefix: str) -> StackedExperts | None:
    """The experts of a layer as one; None where there is no kernel for that, which a note says."""
    config = weights.config.experts
    assert config is not None
    if not can_stack(weights.device, weights.dtype):
        return None
    before = weights.num_bytes, weights.stored_bytes
    stacked = stack(
        ((expert.up, expert.down) for expert in _build_experts(weights, prefix)),
        count=config.num_experts,
        activation=weights.config.activation,
        num_chosen=config.num_chosen,
        normalize=config.normalize,
    )
    if not isinstance(stacked, str):
        return stacked
    weights.num_bytes, weights.stored_bytes = before
    note = f"experts run one after another, as the host asks who is chosen: {stacked}"
    if note not in weights.notes:
        weights.notes.append(note)
    return None
