"""Move one scale per channel from a linear's input into the linear's weight, without changing the layer's output.

AWQ and SmoothQuant do this: y = (x / s) (W * s)', where x is the input, s the scales and W the weight. The division is
folded into the norm or linear that computes x, the *source*.
Shapes: N outputs, K inputs; each value head of width d feeds K / (kv_heads * d) query heads.
"""

import torch
from torch import Tensor

from quantkit.compress.calibration.folding import folded
from quantkit.compress.calibration.layer import LayerContext
from quantkit.models.linear_sets import LinearSet


def can_fold(layer: LayerContext, group: LinearSet) -> bool:
    """Whether the scales of a set of linears can be divided out of the set's source and multiplied into its linears.

    This needs a source, and neither the source nor a linear may have codes. The source must have as many outputs as the
    set has inputs, or its outputs must be value heads that are repeated. Sets in `layer.data.unscaled` are not scaled.
    """
    if group.source is None or group.linears[0] in layer.data.unscaled:
        return False
    if not layer.chosen.quantized.keys().isdisjoint((group.source, *group.linears)):
        return False
    width, outputs = layer.weight(group.linears[0]).shape[1], _outputs(layer, group)
    return outputs == width or (group.grouped_heads and width % outputs == 0)


def shared_by_heads(layer: LayerContext, group: LinearSet, values: Tensor) -> Tensor:
    """Replace the values of inputs that come from the same source channel by their mean.

    Args:
        layer: the layer; not modified.
        group: a set for which `can_fold` holds.
        values: (K,) statistics; not modified.
    Returns:
        (K,): equal values in all query heads that share a value head; `values` itself if no heads are shared.
    """
    outputs = _outputs(layer, group)
    if outputs == values.shape[0]:
        return values
    heads = values.view(outputs // layer.head_dim, -1, layer.head_dim)  # (kv heads, repeats, d)
    return heads.mean(dim=1, keepdim=True).expand_as(heads).reshape(-1)


def fold(layer: LayerContext, group: LinearSet, scales: Tensor) -> None:
    """Divide a set's input by `scales` in the set's source, and multiply the weights of the set's linears by `scales`.

    Args:
        layer: modified; unquantized modules that read the input are rescaled too, so that the layer's output does not
            change. Ranges that a step chose for these linears or the source are discarded.
        group: a set for which `can_fold` holds.
        scales: (K,) float32, > 0, equal in all query heads that share a value head.
    """
    scales = _representable(layer, group, scales)
    for name, values in folded(layer.block, group, scales, layer.head_dim):
        if name.removesuffix(".weight") not in layer.schemes:
            # This parameter is written unquantized, so it is rounded to its stored dtype now, not later.
            values = values.to(layer.stored_dtype.get(name, values.dtype))
        layer.block.get_parameter(name).data.copy_(values)
    for name in (*group.linears, group.source or ""):
        layer.chosen.ranges.pop(name, None)  # because they were chosen for the values before folding
    layer.divide_inputs(group, scales)


def _representable(layer: LayerContext, group: LinearSet, scales: Tensor) -> Tensor:
    """Return the scales (K,) by which the source is really divided once its new weight is rounded to its stored dtype.

    They differ from `scales` only if the source adds an offset, e.g. computes x * (1 + weight). For a weight near -1,
    the steps of bfloat16 are large compared with 1 + weight. The linears must be multiplied by the returned scales.
    """
    if not group.source_offset:
        return scales
    name, offset = f"{group.source}.weight", group.source_offset
    weight = layer.block.get_parameter(name).data.float() + offset
    stored = (weight / scales - offset).to(layer.stored_dtype.get(name, weight.dtype)).float() + offset
    exact = weight / stored
    return torch.where(torch.isfinite(exact) & (exact > 0), exact, torch.ones_like(exact))


def spread(scales: Tensor) -> Tensor:
    """Divide scales by a common factor so that the largest is the inverse of the smallest, and clamp them to a range.

    Args:
        scales: (K,) float32, >= 0; zero or non-finite entries are first replaced by 1.
    Returns:
        (K,), from 1e-4 to 1e4.
    """
    usable = torch.isfinite(scales) & (scales > 0)
    scales = torch.where(usable, scales, torch.ones_like(scales))
    # A common factor cancels between source and weights; with this factor, both keep about the magnitude that they had.
    centred = scales / (scales.max() * scales.min()).sqrt()
    return centred.clamp_(1e-4, 1e4)


def _outputs(layer: LayerContext, group: LinearSet) -> int:
    """Return the number of outputs of the set's source."""
    return layer.block.get_parameter(f"{group.source}.weight").shape[0]
