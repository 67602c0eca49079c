"""Fold a scale s per channel of a linear's input x into parameters: y = (x / s) (W * s)', where W is the weight.

This module only computes the values. `algorithms._smoothing` and `discover` decide which modules may be changed.
Shapes: N outputs, K inputs; a value head of width d feeds K / (kv_heads * d) query heads.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from quantkit.models.linear_sets import LinearSet


def folded(block: nn.Module, group: LinearSet, scales: Tensor, head_dim: int) -> Iterator[tuple[str, Tensor]]:
    """Yield new values of parameters: those of a set's source divided by `scales`, and those of its readers multiplied.

    Args:
        block: the layer; not modified, but the caller may replace each parameter when it gets the new value.
        group: a set with a source. The source's output is as wide as the set's input, or consists of value heads that
            query heads share.
        scales: (K,) float32, > 0, equal in all query heads that share a value head.
        head_dim: width of an attention head.
    Yields:
        Relative name and float32 value of each parameter of the source, then of each weight that reads the source's
        output.
    """
    assert group.source is not None, "nothing can absorb the scale"
    outputs = block.get_parameter(f"{group.source}.weight").shape[0]
    divisor = output_divisor(scales, outputs, head_dim)
    for name, parameter in block.get_submodule(group.source).named_parameters(recurse=False):
        rows = divisor if name == "bias" or parameter.dim() == 1 else divisor.unsqueeze(1)
        offset = group.source_offset if name == "weight" else 0.0
        yield f"{group.source}.{name}", (parameter.data.float() + offset) / rows - offset
    for name in (*group.linears, *group.beside):
        yield f"{name}.weight", block.get_parameter(f"{name}.weight").data.float() * scales


def output_divisor(scales: Tensor, outputs: int, head_dim: int) -> Tensor:
    """Return the factors (outputs,) by which to divide a source's outputs so that the inputs of the linears after it
    are divided by `scales` (K,).
    """
    if outputs == scales.shape[0]:
        return scales
    # Scales are equal in all query heads of a value head, so those of the first head are used.
    return scales.view(outputs // head_dim, -1, head_dim)[:, 0].reshape(-1)
