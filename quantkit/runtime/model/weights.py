"""Conversion of tensors on disk to parts of a model: read, decode, fuse and lay out one group of linears at a time.

Apart from finished parts, memory never holds more than one group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError
from quantkit.formats.base import Format
from quantkit.kernels.ops.linear import build_linear, can_stack, join, stack
from quantkit.kernels.reference.experts import choose_experts, route
from quantkit.kernels.reference.ops import CLAMPED_SWIGLU, LIMITED_SWIGLU, XIELU, clamped_swiglu, xielu
from quantkit.kernels.types import AttentionOptions, Linear, StackedExperts, WrappedLinear
from quantkit.models.description import ExpertsShape
from quantkit.models.layer_tensors import norm_names, per_head
from quantkit.models.linear_sets import at
from quantkit.models.rope import RopeConfig
from quantkit.numerics.scheme import ActivationScheme, Scheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.runtime.model import layers
from quantkit.runtime.model.adapters import Adapters
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.expected_tensors import local_names, manifest_of, stored_scheme
from quantkit.runtime.model.latent_attention import LatentAttention
from quantkit.runtime.model.layers import (
    MLP,
    AnyAttention,
    Attention,
    Block,
    LayerNorm,
    Mixture,
    Norm,
    RMSNorm,
    SideBySide,
)
from quantkit.runtime.model.recurrent import RecurrentMixer, stored_rows
from quantkit.runtime.model.rope import query_growth

Weight = Tensor | QuantizedTensor


@dataclass(kw_only=True, slots=True)
class Weights:
    """Builds the parts of a model from a checkpoint. *Mutable*: it counts the bytes of the parts that it builds.

    Args:
        reader: reader of the checkpoint.
        config: config of the model.
        format, scheme: format and scheme of the quantized linears; both are None if no linear is quantized.
        dtype, device: dtype and device of the computation.
        rounds_inputs: whether linears may round their inputs to int16, see `LinearSettings`.
        num_bytes: bytes of all parts built so far.
        stored_bytes: bytes of these parts that one decode step reads.
        adapters: adapters whose updates are applied to the linears.
        notes: decisions made while building that users should know about.
    """

    reader: CheckpointReader
    config: ModelConfig
    format: Format | None
    scheme: Scheme | None
    dtype: torch.dtype
    device: torch.device
    rounds_inputs: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    num_bytes: int = 0
    stored_bytes: int = 0
    notes: dict[str, None] = field(default_factory=dict)  # keys only: each note once
    _local: dict[str, set[str]] = field(init=False)

    def __post_init__(self) -> None:
        self._local = local_names(self.reader, manifest_of(self.config)[1])

    def count(self, num_bytes: int, read: int | None = None) -> None:
        """Count the bytes of a part; a decode step reads `read` of these bytes, or all if `read` is None."""
        self.num_bytes += num_bytes
        self.stored_bytes += num_bytes if read is None else read

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor that is never quantized, and convert it to `dtype` or else to the model's dtype."""
        value = self.reader.tensor(name).to(self.device, dtype or self.dtype)
        self.num_bytes += value.nbytes
        return value

    def norm(self, *names: str, eps: float | None = None) -> Norm:
        """Build a norm from one module, or from one module per head if several full module names are given."""
        eps = self.config.norm_eps if eps is None else eps
        if self.config.family.norm == "bare":
            return LayerNorm(None, None, eps)
        parts, bias = [self.tensor(f"{name}.weight") for name in names], f"{names[0]}.bias"
        weight = parts[0] if len(parts) == 1 else torch.stack(parts)
        self.stored_bytes += weight.nbytes
        if self.config.family.norm == "layer":
            shift = self.tensor(bias) if bias in self.reader else None
            return LayerNorm(weight + self.config.norm_offset, shift, eps)
        return RMSNorm(weight, eps, self.config.norm_offset)

    def linear(
        self, names: Sequence[str], orders: Mapping[str, Tensor] | None = None, read_share: float = 1.0
    ) -> Linear:
        """Build one linear from modules that read the same input; their outputs are concatenated.

        Args:
            names: full module names.
            orders: indices (N,) that put the rows of a module in the order needed, keyed by full module name; only for
                modules that are stored in a different order.
            read_share: share of the weight that a decode step reads; below 1 only for experts.
        """
        stored = [self._read(name) for name in names]
        weights, schemes = [weight for weight, _ in stored], [activation for _, activation in stored]
        biases, sizes = self.biases(names, weights), [weight.shape[0] for weight in weights]
        for number, name in enumerate(names):
            if (order := (orders or {}).get(name)) is not None:
                weight = weights[number]
                weights[number] = weight[order] if isinstance(weight, Tensor) else weight.take_rows(order)
                if biases is not None:
                    biases[number] = biases[number][order]
        # Keep no second reference: a weight must be freed as soon as it has been copied, by joining or laying out.
        del stored
        joined: Weight | None = weights[0]
        if len(weights) > 1:  # join only if inputs are quantized alike; a mixed list gives None too
            joined = join(weights) if len(set(schemes)) == 1 else None  # type: ignore[arg-type]
        if joined is None:
            each: Sequence[Tensor | None] = biases or [None] * len(names)
            parts = zip(weights, each, schemes, strict=True)
            result: Linear = SideBySide([self.build(*part) for part in parts])
        else:
            weights.clear()
            bias = None if biases is None else torch.cat(biases)
            result = self.build(joined, bias, schemes[0])
        self.count(result.stored_bytes, round(result.stored_bytes * read_share))
        if read_share < 1:  # an expert, which does not get all rows of a step
            return result
        return self.adapters.adapted(result, names, sizes, orders or {}, self.dtype, self.device)

    def exact_linear(self, names: Sequence[str]) -> Linear:
        """Build a linear that multiplies in float32, whatever the model's dtype."""
        (name,) = names
        weight = self.reader.tensor(f"{name}.weight").to(self.device, torch.float32)
        result = build_linear(weight, dtype=torch.float32, device=self.device)
        self.count(result.stored_bytes)
        return WrappedLinear(result, Tensor.float)

    def dense(self, name: str) -> Tensor:
        """Return the weight (N, K) of a linear, dequantized if it is quantized."""
        weight, _ = self._read(name)
        if not isinstance(weight, Tensor):
            weight = weight.dequantize()
            part = name.rpartition(".")[2]
            self.notes[f"{part} is dequantized at load, because attention uses parts of this weight separately"] = None
        value = weight.to(self.device, self.dtype)
        self.count(value.nbytes)
        return value

    def build(self, weight: Weight, bias: Tensor | None, activation: ActivationScheme | None = None) -> Linear:
        """Build a linear from its parts without counting its bytes."""
        return build_linear(
            weight,
            bias=bias,
            activation=activation,
            dtype=self.dtype,
            device=self.device,
            rounds_inputs=self.rounds_inputs,
        )

    def _read(self, name: str) -> tuple[Weight, ActivationScheme | None]:
        local = self._local[name]
        linear = stored_scheme(name, local, self.scheme)
        if linear is None or self.format is None:
            return self.reader.tensor(f"{name}.weight").to(self.device), None
        tensors = {item: self.reader.tensor(f"{name}.{item}") for item in local if item != "bias"}
        try:
            weight = self.format.decode(tensors, linear)
        except CheckpointError as error:
            raise CheckpointError(f"{self.reader.path}: {name}: {error}") from None
        return weight, linear.activation

    def biases(self, names: Sequence[str], weights: Sequence[Weight]) -> list[Tensor] | None:
        """Return the bias of each module, or zeros for a module without a bias; None if no module has a bias."""
        stored = [f"{name}.bias" for name in names]
        if not any(name in self.reader for name in stored):
            return None
        return [
            self.reader.tensor(name).to(self.device, self.dtype)
            if name in self.reader
            else torch.zeros(weight.shape[0], dtype=self.dtype, device=self.device)
            for name, weight in zip(stored, weights, strict=True)
        ]


def build_block(weights: Weights, index: int, ropes: Sequence[RopeConfig], prefix: str | None = None) -> Block:
    """Build one decoder layer.

    Args:
        weights: builds the parts of the layer and counts their bytes.
        index: layer number.
        ropes: rotary embeddings of the model.
        prefix: prefix of the names of the layer's tensors; None = the prefix of layer `index`.
    """
    config = weights.config
    prefix, rope = prefix or f"{config.family.layers}.{index}.", config.ropes[index]
    norms = [None if name is None else weights.norm(prefix + name) for name in norm_names(config)]
    up, down, gated = config.family.parts.up, config.family.parts.down, config.family.parts.gated
    mlp: Callable[[Tensor], Tensor] | None = None
    attention: AnyAttention | None = None
    if config.only_mlp[index] or not config.family.one_half:
        sparse = config.with_experts[index]
        mlp = build_mixture(weights, prefix) if sparse else _build_mlp(weights, up, down, prefix, gated)
    if not config.only_mlp[index]:
        latent = _build_attention if config.latent is None else _build_latent
        attention = (_build_recurrent if config.recurrent[index] else latent)(weights, index, prefix)
    return Block(
        mlp=mlp,
        attention=attention,
        input_norm=norms[0],
        attention_norm=norms[1],
        mlp_norm=norms[2],
        output_norm=norms[3],
        parallel=config.parallel,
        scale=config.residual_scale,
        rope=None if rope is None else ropes.index(rope),
    )


def _build_attention(weights: Weights, index: int, prefix: str) -> Attention:
    config, rope = weights.config, weights.config.ropes[index]
    parts, norm = config.family.parts, config.family.qk_norm
    flat, norms, fused = norm is not None and norm.over == "projection", None, None
    if norm is not None and config.qk_norm:
        heads = per_head(prefix + norm.query, config.num_heads), per_head(prefix + norm.key, config.num_kv_heads)
        norms = weights.norm(*heads[0]), weights.norm(*heads[1])
        fused = None if flat or norm.after_rotation else layers.kernel_norms(*norms)
    rows = layers.query_rows(parts, config.num_heads, config.head_dim)
    orders = {} if rows is None else {prefix + parts.qkv[0]: rows.to(weights.device)}
    return Attention(
        layer=index,
        qkv=weights.linear([prefix + name for name in parts.qkv], orders),
        output=weights.linear([prefix + parts.output]),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        options=AttentionOptions(
            scale=config.attention_scale,
            window=config.windows[index],
            softcap=config.attention_softcap,
            interleaved=rope is not None and rope.interleaved,
            norms=fused,
            sinks=None if config.family.sinks is None else weights.tensor(prefix + config.family.sinks, torch.float32),
        ),
        norms=None if fused else norms,
        norm_flat=flat,
        is_gated=parts.gated_query,
        norm_last=norm is not None and norm.after_rotation,
        clip=config.clip,
        growth=partial(query_growth, rope) if rope is not None and rope.growth else None,
    )


def _build_latent(weights: Weights, index: int, prefix: str) -> LatentAttention:
    config, rope, sizes = weights.config, weights.config.ropes[index], weights.config.latent
    assert sizes is not None
    prefix += "self_attn."
    narrow = sizes.query_rank > 0
    query = "q_a_proj" if narrow else "q_proj"
    up = weights.dense(f"{prefix}kv_b_proj").view(config.num_heads, -1, sizes.rank)  # (Hq, P + V, C)
    key_up, value_up = up.tensor_split((sizes.plain_dim,), dim=1)
    return LatentAttention(
        layer=index,
        qkv=weights.linear([prefix + query, f"{prefix}kv_a_proj_with_mqa"]),
        # The epsilon of these norms is fixed, whatever config.json says.
        query_norm=weights.norm(f"{prefix}q_a_layernorm", eps=1e-6) if narrow else None,
        query_up=weights.linear([f"{prefix}q_b_proj"]) if narrow else None,
        latent_norm=weights.norm(f"{prefix}kv_a_layernorm", eps=1e-6),
        key_up=key_up.contiguous(),
        value_up=value_up.transpose(1, 2).contiguous(),
        output=weights.linear([f"{prefix}o_proj"]),
        sizes=sizes,
        options=AttentionOptions(scale=config.attention_scale, interleaved=rope is not None and rope.interleaved),
        growth=partial(query_growth, rope) if rope is not None and rope.growth else None,
    )


def _build_recurrent(weights: Weights, index: int, prefix: str) -> RecurrentMixer:
    """Build the recurrent layer with number `index`; its tensor names begin with `prefix`."""
    config = weights.config
    data = config.family.recurrent
    assert data is not None
    shape = data.shape(config.entries)
    rows = {name: rows.to(weights.device) for name, rows in stored_rows(data, shape).items()}

    def tensor(part: str) -> Tensor:
        return weights.tensor(prefix + data.name(part), torch.float32)

    conv, bias = tensor("conv1d.weight").squeeze(1), None
    if config.entries.flag(data.conv_bias):
        bias = tensor("conv1d.bias")
    if (order := rows.get("conv1d")) is not None:
        conv, bias = conv[order], None if bias is None else bias[order]
    norm = tensor("norm.weight")
    names = [prefix + data.name(part) for part in (*data.inputs, *data.gates)]
    return RecurrentMixer(
        kind=data.kind,
        layer=index,
        qkv=weights.linear(names, {prefix + data.name(part): order for part, order in rows.items()}),
        output=weights.linear([prefix + data.name("out_proj")]),
        shape=shape,
        conv=conv.mT.contiguous(),
        conv_bias=bias,
        decay=-tensor("A_log").exp(),
        step_bias=tensor("dt_bias"),
        least_step=config.entries.number(data.least_step, default=0.0),
        skip=tensor("D") if data.kind == "mamba2" else None,
        norm=norm if data.norm_groups is None else norm.view(config.entries.count(data.norm_groups), -1),
        eps=config.norm_eps,
    )


def _build_mlp(
    weights: Weights, up: Sequence[str], down: str, prefix: str, gated: bool = True, read_share: float = 1.0
) -> MLP:
    return MLP(
        weights.linear([prefix + name for name in up], read_share=read_share),
        weights.linear([prefix + down], read_share=read_share),
        weights.config.activation,
        gated,
        _build_curve(weights, f"{prefix}{down.rpartition('.')[0]}.act_fn"),
    )


def _build_curve(weights: Weights, owner: str) -> Callable[[Tensor], Tensor] | None:
    """Build the activation of an MLP if it has parameters; return None for a named activation without parameters.

    Args:
        weights: reads the parameters.
        owner: full name of the activation's module.
    """
    config, read = weights.config, weights.config.entries
    if config.activation == LIMITED_SWIGLU:
        return partial(clamped_swiglu, alpha=1.0, limit=read.number("swiglu_limit", default=10.0), offset=0.0)
    if config.activation == CLAMPED_SWIGLU:
        alpha, limit = read.number("swiglu_alpha", default=1.702), read.number("swiglu_limit", default=7.0)
        return partial(clamped_swiglu, alpha=alpha, limit=limit)
    if config.activation != XIELU:
        return None
    names = ("alpha_p", "alpha_n", *(name for name in ("beta", "eps") if f"{owner}.{name}" in weights.reader))
    return partial(xielu, **{name: weights.tensor(f"{owner}.{name}") for name in names})


def build_mixture(weights: Weights, prefix: str) -> Mixture:
    """Build the mixture of experts of a layer."""
    config, data = weights.config.experts, weights.config.family.experts
    assert config is not None and data is not None
    shared = shared_gate = None
    if config.shared_width is not None and data.shared_down is not None:
        shared = _build_mlp(weights, data.shared_up, data.shared_down, prefix, data.gated)
    if data.shared_gate is not None:
        shared_gate = weights.linear([prefix + data.shared_gate])

    def experts() -> Iterator[MLP]:
        """Yield the experts one after another, as they are requested."""
        for number in range(config.num_experts):
            up, down = [at(name, number) for name in data.up], at(data.down, number)
            yield _build_mlp(weights, up, down, prefix, data.gated, config.num_chosen / config.num_experts)

    balance = None if data.balance is None else weights.tensor(prefix + data.balance, torch.float32).view(-1)
    choose = partial(choose_experts, experts=config, balance=balance)
    if balance is None and config.is_plain:
        choose = partial(route, num_chosen=config.num_chosen, normalize=config.normalize)
    return Mixture(
        router=(weights.exact_linear if data.exact else weights.linear)([prefix + data.router]),
        # A new iterator: the first may be partly used up when stacking turns out to be impossible.
        experts=(data.gated and _stack(weights, config, experts())) or tuple(experts()),
        choose=choose,
        shared=shared,
        shared_gate=shared_gate,
    )


def _stack(weights: Weights, config: ExpertsShape, experts: Iterator[MLP]) -> StackedExperts | None:
    """Combine the experts of a layer into one module; return None if no kernel can run them together."""
    if not can_stack(weights.device, weights.dtype):
        return None
    before = weights.num_bytes, weights.stored_bytes
    pairs = ((expert.up, expert.down) for expert in experts)
    stacked = stack(pairs, count=config.num_experts, activation=weights.config.activation)
    if not isinstance(stacked, str):
        return stacked
    # The experts are then read again, one by one, and must not be counted twice.
    weights.num_bytes, weights.stored_bytes = before
    weights.notes[f"experts run one after another instead of in one kernel: {stacked}"] = None
    return None
