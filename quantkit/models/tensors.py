"""Descriptions of a decoder layer's tensors: the matrix of each linear, and all other tensors. Torch-free.

N outputs, K inputs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quantkit.models.layer_state_sizes import AttentionShape, StateShape
from quantkit.models.linear_sets import EXPERT, at


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A linear of a decoder layer, or copies of a linear in several experts.

    Args:
        name: name relative to the layer; `{expert}` stands for the number of each copy.
        out_features, in_features: N and K.
        copies: number of experts that have this linear; 1 if it belongs to no expert.
        active: number of copies that a token uses.
        quantizable: False for modules that are never quantized, such as routers.
        bias: whether each copy has a bias (N,), as far as is known.
    """

    name: str
    out_features: int
    in_features: int
    copies: int = 1
    active: int = 1
    quantizable: bool = True
    bias: bool = field(default=False, compare=False)

    @property
    def num_parameters(self) -> int:
        """Number of weights in all copies."""
        return self.copies * self.out_features * self.in_features

    @property
    def active_parameters(self) -> int:
        """Number of weights that a token uses."""
        return self.active * self.out_features * self.in_features

    @property
    def first(self) -> str:
        """Name of the first copy, e.g. `mlp.experts.0.up_proj`."""
        return at(self.name, 0)

    @property
    def names(self) -> Iterator[str]:
        """Names of all copies."""
        return (at(self.name, number) for number in range(self.copies)) if EXPERT in self.name else iter((self.name,))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTensors:
    """Tensors of one decoder layer.

    Args:
        matrices: the layer's linears, in execution order.
        vectors: shapes of all other tensors (norms, sinks, balances) except biases of linears, keyed by relative name.
        attention: shape of the layer's cache or state.
    """

    matrices: tuple[Matrix, ...]
    vectors: Mapping[str, tuple[int, ...]]
    attention: AttentionShape | StateShape

    @property
    def other_parameters(self) -> int:
        """Number of parameters that are in no matrix."""
        biases = sum(matrix.copies * matrix.out_features for matrix in self.matrices if matrix.bias)
        return biases + sum(map(math.prod, self.vectors.values()))

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the layer."""
        return self.other_parameters + sum(matrix.num_parameters for matrix in self.matrices)
