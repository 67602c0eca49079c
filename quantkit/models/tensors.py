"""The tensors of a decoder layer as data: linears that are one matrix each, and everything else.

N outputs, K inputs. Torch-free.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quantkit.models.layer_state_sizes import AttentionShape, StateShape
from quantkit.models.linear_sets import EXPERT, at


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A linear of a decoder layer, or equal ones of several experts.

    Args:
        name: relative to the layer; `{expert}` stands for the number of each copy.
        out_features, in_features: N and K.
        copies: how many there are.
        active: how many of them a token uses.
        quantizable: False for routers and the like, which stay as they are.
        bias: whether each has a bias (N,), as far as is known.
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
        """Weights of all copies."""
        return self.copies * self.out_features * self.in_features

    @property
    def active_parameters(self) -> int:
        """Weights that a token uses."""
        return self.active * self.out_features * self.in_features

    @property
    def first(self) -> str:
        """The name of the first copy, `mlp.experts.0.up_proj`."""
        return at(self.name, 0)

    @property
    def names(self) -> Iterator[str]:
        """The names of all copies."""
        return (at(self.name, number) for number in range(self.copies)) if EXPERT in self.name else iter((self.name,))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTensors:
    """Tensors of one decoder layer.

    Args:
        matrices: its linears, in running order.
        vectors: shape by relative name of everything else but biases of linears: norms, sinks, balances.
        attention: its cache, or its state.
    """

    matrices: tuple[Matrix, ...]
    vectors: Mapping[str, tuple[int, ...]]
    attention: AttentionShape | StateShape

    @property
    def other_parameters(self) -> int:
        """Parameters that are in no matrix."""
        biases = sum(matrix.copies * matrix.out_features for matrix in self.matrices if matrix.bias)
        return biases + sum(map(math.prod, self.vectors.values()))

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return self.other_parameters + sum(matrix.num_parameters for matrix in self.matrices)
