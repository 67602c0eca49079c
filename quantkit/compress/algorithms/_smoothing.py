"""Move a scale per channel from a linear's input into its weights, without changing the layer's output.

AWQ and SmoothQuant use it: y = (x / s) (W * s)', where x is the input, s the scales and W the weight. The division is
folded into the norm or linear that computes x.
Shapes: N outputs, K inputs; a value head of width d feeds K / (kv_heads * d) query heads.
"""

import torch
from torch import Tensor

from quantkit.compress.calibration.folding import folded
from quantkit.compress.calibration.layer import LayerContext
from quantkit.models.linear_sets import LinearSet


def can_fold(layer: LayerContext, group: LinearSet) -> bool:
    """Whether the module that computes the set's input can absorb the division.

    It cannot if it is a linear that already has codes, or if its outputs do not match the inputs head by head. Nor can
    it if a linear that reads the input already has codes, because that linear's weight would have to be multiplied.
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
        (K,): query heads that share a key/value head get their mean; `values` itself if none are shared.
    """
    outputs = _outputs(layer, group)
    if outputs == values.shape[0]:
        return values
    heads = values.view(outputs // layer.head_dim, -1, layer.head_dim)  # (kv heads, repeats, d)
    return heads.mean(dim=1, keepdim=True).expand_as(heads).reshape(-1)


def fold(layer: LayerContext, group: LinearSet, scales: Tensor) -> None:
    """Divide the set's input by `scales` at its source and multiply the weights of all its linears.

    Args:
        layer: modified; unquantized modules that read the input are rescaled too, so that the layer's output does not
            change.
        group: a set for which `can_fold` holds.
        scales: (K,) float32, > 0, equal within shared heads.
    """
    for name, values in folded(layer.block, group, scales, layer.head_dim):
        if name.removesuffix(".weight") not in layer.schemes:
            # This parameter is written unquantized, so it is rounded to its stored dtype now, not later.
            values = values.to(layer.stored_dtype.get(name, values.dtype))
        layer.block.get_parameter(name).data.copy_(values)
    for name in (*group.linears, group.source or ""):
        layer.chosen.ranges.pop(name, None)  # they were chosen for other values
    layer.divide_inputs(group, scales)


def spread(scales: Tensor) -> Tensor:
    """Center scales so that the largest is the inverse of the smallest, and limit them to a safe range.

    Args:
        scales: (K,) float32, >= 0; zero or non-finite entries become 1.
    """
    usable = torch.isfinite(scales) & (scales > 0)
    scales = torch.where(usable, scales, torch.ones_like(scales))
    # A common factor cancels between source and weights; centred, both keep about the size that they had.
    centred = scales / (scales.max() * scales.min()).sqrt()
    return centred.clamp_(1e-4, 1e4)


def _outputs(layer: LayerContext, group: LinearSet) -> int:
    """Return the number of outputs of the source."""
    return layer.block.get_parameter(f"{group.source}.weight").shape[0]
