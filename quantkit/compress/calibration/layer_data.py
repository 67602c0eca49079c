"""State of a layer during compression: data about its inputs, and the choices made for it."""

from dataclasses import dataclass, field

from torch import Tensor

from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.stream import Stream
from quantkit.numerics.affine import Ranges
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LinearRecord


@dataclass(kw_only=True, slots=True)
class LayerData:
    """Data about a layer's inputs: the original model's data, token counts, and folded scales. *Mutable*.

    Args:
        original: the original layer with the original model's inputs; None unless a step needs them.
        targets: the original model's hidden states after the layer, if a step needs these but not `original`.
        all_tokens: whether statistics of experts use all tokens instead of the routed ones; the layer's output is not
            affected.
        tokens_per_expert: number of tokens routed to each expert; set by `LayerContext.count_tokens`.
        unscaled: sets whose inputs no step may scale, each given by its first linear.
        divisors: (K,) factors by which the inputs of a set have been divided since the layer was loaded, keyed by the
            set's first linear.
        output_divisors: (N,) factors by which the outputs of a linear have been divided since the layer was loaded,
            keyed by the linear.
    """

    original: Stream | None = None
    targets: ActivationStore | None = None
    all_tokens: bool = True
    tokens_per_expert: tuple[int, ...] = ()
    unscaled: frozenset[str] = frozenset()
    divisors: dict[str, Tensor] = field(default_factory=dict)
    output_divisors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class LayerChoices:
    """Choices made for a layer so far, keyed by relative name. *Mutable*.

    Args:
        ranges: ranges that a step chose for the later rounding.
        quantized: quantized weights; the layer computes with their dequantized values.
        solved: linears for which a step chose the codes, not only the ranges.
        tensor_largest: see `WeightGrid`; keyed by the first of the linears that share a tensor-wide scale. A value
            is fixed when the first of these linears gets codes.
        cache_scales: scales of the KV cache, which are written beside the weights.
        records: errors and sizes of the quantized linears.
        notes: remarks for the user, one sentence each.
    """

    ranges: dict[str, Ranges] = field(default_factory=dict)
    quantized: dict[str, QuantizedTensor] = field(default_factory=dict)
    solved: set[str] = field(default_factory=set)
    tensor_largest: dict[str, Tensor] = field(default_factory=dict)
    cache_scales: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, LinearRecord] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
