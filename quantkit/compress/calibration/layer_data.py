"""State of a layer during compression: its inputs and their statistics, and the choices made for it."""

from dataclasses import dataclass, field

from torch import Tensor

from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.stream import Stream
from quantkit.numerics.affine import Ranges
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.results import LinearRecord


@dataclass(kw_only=True, slots=True)
class LayerData:
    """Inputs of a layer, and their statistics. *Mutable*.

    Args:
        original: the layer as it was, and what enters it in the original model; only there when a step compares with
            it.
        targets: hidden states after the layer in the original model, where a step asks for nothing else of it.
        all_tokens: statistics of experts are of all tokens, not of those that are routed to them; what the layer
            computes is not affected.
        tokens_per_expert: how many tokens are routed to each; set by `LayerContext.count_tokens`.
        divisors: (K,) what the inputs of a set have been divided by since the layer was loaded, by its first linear.
        output_divisors: (N,) what the outputs of a linear have been divided by since then, by its name.
    """

    original: Stream | None = None
    targets: ActivationStore | None = None
    all_tokens: bool = True
    tokens_per_expert: tuple[int, ...] = ()
    divisors: dict[str, Tensor] = field(default_factory=dict)
    output_divisors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class LayerChoices:
    """Choices made for a layer so far, by relative name. *Mutable*.

    Args:
        ranges: that a step has left for the rounding that follows.
        quantized: codes; the layer computes with their values.
        solved: linears whose codes a step has chosen itself, not only their ranges.
        tensor_largest: see `WeightGrid`, of linears that share it, by the first of them; fixed by their first codes.
        cache_scales: tensors of the KV cache to write beside the weights.
        records: what the codes cost.
        notes: what a user should know, a sentence each.
    """

    ranges: dict[str, Ranges] = field(default_factory=dict)
    quantized: dict[str, QuantizedTensor] = field(default_factory=dict)
    solved: set[str] = field(default_factory=set)
    tensor_largest: dict[str, Tensor] = field(default_factory=dict)
    cache_scales: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, LinearRecord] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
