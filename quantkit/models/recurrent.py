"""Recurrent layers, which keep a state of fixed size per sequence instead of keys and values per token. Torch-free.

There are two kinds, which differ only in how a token updates the state S (N, P) of a head:

    gated delta net   S = d S;  S += k (b (v - k S))     o = q S                 (Qwen3-Next, Qwen3.5)
    mamba 2           S = d S;  S += k (t v)             o = q S + D v           (Granite 4, Nemotron-H, Bamba)

The decay d and the step sizes b and t are scalars per head and token. A short convolution over the tokens precedes the
update; a norm and a gate follow it. W is the width of the convolution. There are G heads of queries and keys with N
channels (Mamba's C and B), and H heads of values with P channels; H is a multiple of G.
Source: Yang et al. 2025, Gated Delta Networks; Dao and Gu 2024, Transformers are SSMs.
"""

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import ModelError
from quantkit.models.config import ConfigReader
from quantkit.models.layer_state_sizes import StateShape
from quantkit.models.layer_tensors import Matrix
from quantkit.models.linear_sets import LinearSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent:
    """Recurrent layers of a family: names of their modules, and config.json keys of their sizes.

    Args:
        kind: kind of the state update, see the module's docstring.
        module: name of the module in place of attention; the other names are relative to this module.
        inputs: linears that compute queries, keys, values and gate.
        gates: linears that compute scalars per head and are never quantized; empty if `inputs` compute the scalars too.
        by_head: whether the rows of `inputs` and `gates` are grouped by key head (all parts of head 0, then of head 1,
            ...); otherwise all rows of one part (queries, keys, values, gate) are contiguous.
        types: values in `layer_types` that denote a recurrent layer.
        interval: key of a number n, used if there is no `layer_types`: every n-th layer has attention, all others are
            recurrent. None = all layers are recurrent.
        key_heads, key_dim, value_heads, value_dim, conv_width: keys of G, N, H, P and W.
        conv_bias, bias: whether the convolution has a bias, and whether the linears have biases; keys or constants.
        norm_groups: key of the norm's number of groups; None = one group per head, with weights shared by all heads.
        activation: key of the activation after the convolution.
        least_step: key of the lower bound of a step size; None = no bound.
    """

    kind: Literal["gated_delta", "mamba2"] = "gated_delta"
    module: str = "linear_attn"
    inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    gates: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    by_head: bool = False
    types: tuple[str, ...] = ("linear_attention",)
    interval: str | None = "full_attention_interval"
    key_heads: str = "linear_num_key_heads"
    key_dim: str = "linear_key_head_dim"
    value_heads: str = "linear_num_value_heads"
    value_dim: str = "linear_value_head_dim"
    conv_width: str = "linear_conv_kernel_dim"
    conv_bias: str | bool = False
    bias: str | bool = False
    norm_groups: str | None = None
    activation: str = "hidden_activation"
    least_step: str | None = None

    def name(self, part: str) -> str:
        """Return the name of a part relative to the layer."""
        return f"{self.module}.{part}"

    def sets(self, norm: str | None) -> tuple[LinearSet, ...]:
        """Return the sets of the layer's linears that read the same tensor.

        Args:
            norm: the layer's first norm; None if this norm cannot absorb a smoothing scale.
        """
        inputs, beside = (tuple(map(self.name, parts)) for parts in (self.inputs, self.gates))
        output = self.name("out_proj")
        # Only a norm with one weight per channel can absorb a scale; without groups, all heads share the weights.
        last = self.name("norm") if self.norm_groups is not None else None
        return (
            LinearSet(linears=inputs, source=norm, parent=self.module, beside=beside, optional=True),
            LinearSet(linears=(output,), source=last, parent=output, optional=True),
        )

    def shape(self, read: ConfigReader) -> StateShape:
        """Return the shape of one layer's state.

        Raises:
            ModelError: the number of value heads is not a multiple of the number of key heads.
        """
        groups, heads = read.count(self.key_heads), read.count(self.value_heads)
        if heads % groups:
            raise ModelError(
                f"{read.where}: {self.value_heads} {heads} is not a multiple of {self.key_heads} {groups}; correct them"
            )
        return StateShape(
            key_heads=groups,
            key_dim=read.count(self.key_dim),
            value_heads=heads,
            value_dim=self._value_dim(read, heads),
            conv_width=read.count(self.conv_width, at_least=2),
        )

    def _value_dim(self, read: ConfigReader, heads: int) -> int:
        if read.get(self.value_dim) != "auto":
            return read.count(self.value_dim)
        return read.count("mamba_expand") * read.count("hidden_size") // heads

    def matrices(self, read: ConfigReader, hidden: int) -> tuple[Matrix, ...]:
        """Return the linears of one recurrent layer."""
        shape, bias = self.shape(read), read.flag(self.bias)
        heads = shape.value_heads
        # Outputs of each linear: everything from one, or queries, keys and values from one and the gate from a second.
        parts = [shape.channels, shape.values] if len(self.inputs) == 2 else [shape.channels + shape.values]
        parts[-1] += 0 if self.gates else heads
        sizes = [*zip(self.inputs, parts, strict=True)]
        sizes += [(name, 2 * heads // len(self.gates)) for name in self.gates]
        return (
            *(
                Matrix(
                    name=self.name(part),
                    out_features=rows,
                    in_features=hidden,
                    bias=bias,
                    quantizable=part not in self.gates,
                )
                for part, rows in sizes
            ),
            Matrix(name=self.name("out_proj"), out_features=hidden, in_features=shape.values, bias=bias),
        )

    def vectors(self, read: ConfigReader) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a recurrent layer's tensors that belong to no linear, keyed by relative name."""
        shape = self.shape(read)
        heads = (shape.value_heads,)
        shapes = {
            "conv1d.weight": (shape.channels, 1, shape.conv_width),
            "A_log": heads,
            "dt_bias": heads,
            "norm.weight": (shape.value_dim,) if self.norm_groups is None else (shape.values,),
        }
        if read.flag(self.conv_bias):
            shapes["conv1d.bias"] = (shape.channels,)
        if self.kind == "mamba2":
            shapes["D"] = heads
        return {self.name(part): size for part, size in shapes.items()}
