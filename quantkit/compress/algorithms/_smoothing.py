"""Moving a scale per channel from a linear's input into its weights, without changing what the layer computes.

Used by AWQ and SmoothQuant: y = (x / s) (W * s)'; the division is folded into the norm or linear that makes x.
Shapes: N outputs, K inputs; a value head of width d feeds K / (kv_heads * d) query heads.
"""

import torch
from torch import Tensor

from quantkit.compress.calibration.folding import folded
from quantkit.compress.calibration.layer import LayerContext
from quantkit.models.linear_sets import LinearSet


def can_fold(layer: LayerContext, group: LinearSet) -> bool:
    """Whether the set's input comes from a module that can absorb the division.

    A linear that is itself already in codes cannot, nor one whose outputs do not map onto the inputs head by head. Nor
    may anything that reads the input be in codes, which would have to be multiplied.
    """
    if group.source is None or not layer.chosen.quantized.keys().isdisjoint((group.source, *group.linears)):
        return False
    width, outputs = layer.weight(group.linears[0]).shape[1], _outputs(layer, group)
    return outputs == width or (group.grouped_heads and width % outputs == 0)


def shared_by_heads(layer: LayerContext, group: LinearSet, values: Tensor) -> Tensor:
    """Make per-input values equal for inputs that come from the same source channel.

    Args:
        layer: the layer; not modified.
        group: a set for which `can_fold` holds.
        values: (K,) statistics; not modified.
    Returns:
        (K,) where query heads of one key/value head carry their mean; `values` itself when nothing is shared.
    """
    outputs = _outputs(layer, group)
    if outputs == values.shape[0]:
        return values
    heads = values.view(outputs // layer.head_dim, -1, layer.head_dim)  # (kv heads, repeats, d)
    return heads.mean(dim=1, keepdim=True).expand_as(heads).reshape(-1)


def fold(layer: LayerContext, group: LinearSet, scales: Tensor) -> None:
    """Divide the set's input by `scales` at its source and multiply the weights of all its linears.

    Args:
        layer: modified; what is ignored is rescaled too, or the layer would change.
        group: a set for which `can_fold` holds.
        scales: (K,) float32, > 0, equal within shared heads.
    """
    for name, values in folded(layer.block, group, scales, layer.head_dim):
        if name.removesuffix(".weight") not in layer.schemes:
            # Written as it is: it takes the rounding of its stored dtype now, not later.
            values = values.to(layer.stored_dtype.get(name, values.dtype))
        layer.block.get_parameter(name).data.copy_(values)
    for name in (*group.linears, group.source or ""):
        layer.chosen.ranges.pop(name, None)  # they were chosen for other values
    layer.divide_inputs(group, scales)


def spread(scales: Tensor) -> Tensor:
    """Scales centred so that the largest and the smallest are each other's inverse, and kept in a safe range.

    Args:
        scales: (K,) float32, >= 0; zero or non-finite entries become 1.
    """
    usable = torch.isfinite(scales) & (scales > 0)
    scales = torch.where(usable, scales, torch.ones_like(scales))
    # A common factor cancels between source and weights; centred, both keep about the size that they had.
    centred = scales / (scales.max() * scales.min()).sqrt()
    return centred.clamp_(1e-4, 1e4)


def _outputs(layer: LayerContext, group: LinearSet) -> int:
    """Width of the source's output."""
    return layer.block.get_parameter(f"{group.source}.weight").shape[0]
