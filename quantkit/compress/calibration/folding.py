"""Folding of a scale per channel into the parameters on both sides of it: y = (x / s) (W * s)'.

Values only; who may fold, and how folded values are stored, is decided by `algorithms._smoothing` and `discover`.
Shapes: N outputs, K inputs; a value head of width d feeds K / (kv_heads * d) query heads.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from quantkit.models.linear_sets import LinearSet


def folded(block: nn.Module, group: LinearSet, scales: Tensor, head_dim: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a layer after the set's input has been divided by `scales` at its source.

    Args:
        block: the layer; not modified, but the caller may set each parameter as its value comes.
        group: a set with a source whose output is as wide as the set's input, or whose value heads are.
        scales: (K,) float32, > 0, equal within shared heads.
        head_dim: width of an attention head.
    Yields:
        relative name and float32 values of all parameters of the source, then of the weights that read its output.
    """
    assert group.source is not None, "nothing can absorb the scale"
    outputs = block.get_parameter(f"{group.source}.weight").shape[0]
    divisor = output_divisor(scales, outputs, head_dim)
    for name, parameter in block.get_submodule(group.source).named_parameters(recurse=False):
        rows = divisor if name == "bias" or parameter.dim() == 1 else divisor.unsqueeze(1)
        yield f"{group.source}.{name}", parameter.data.float() / rows
    for name in (*group.linears, *group.beside):
        yield f"{name}.weight", block.get_parameter(f"{name}.weight").data.float() * scales


def output_divisor(scales: Tensor, outputs: int, head_dim: int) -> Tensor:
    """Factors (outputs,) that divide the outputs of a source whose readers' inputs are divided by `scales` (K,)."""
    if outputs == scales.shape[0]:
        return scales
    # Equal in all query heads of a value head, so the first of them speaks for it.
    return scales.view(outputs // head_dim, -1, head_dim)[:, 0].reshape(-1)
