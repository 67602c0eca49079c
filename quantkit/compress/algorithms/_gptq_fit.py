"""Fit scales to given codes by least squares on the outputs; see `gptq`.

The output error of a weight row w is (w - D s)' H (w - D s). H is the Hessian of the inputs, column j of D holds the
codes of group j minus their zero point, and s holds the scales. This is a least-squares problem with one unknown per
group.
Shapes: N outputs, K inputs, G groups of g inputs. Codes are transposed: one row per input.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.compress.algorithms._gptq_factor import Factor
from quantkit.compress.algorithms._gptq_loop import Settled
from quantkit.numerics import matmul, native
from quantkit.numerics.affine import Ranges

# Maximum number of elements of codes or of normal equations in memory at once, and of columns of the Hessian.
_ELEMENTS, _COLUMNS = 1 << 21, 512
# Maximum number of elements of the products of codes and Hessian in memory at once.
_PRODUCT_ELEMENTS = 1 << 21
# Number of rows of the factor whose products are in memory at once.
_ROWS = 256


def fit_scales(
    settled: Settled, ranges: Ranges, factor: Factor, group_index: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return, for each row, the scales of all groups that together minimize the output error with the given codes.

    The unknowns of the equations are the changes of the scales, so the right side depends only on the current error.

    Args:
        settled: codes and errors of all rows; not modified.
        ranges: scale and zero point (N, G) float32 from which the codes were computed.
        factor: factor of the inputs' Hessian.
        group_index: (K,) group of each column.
        dtype: dtype of the products, see `settle_columns`.
    Returns:
        (N, G) float32. A scale keeps its old value if the fitted one is zero, not finite, or of the opposite sign.
    """
    (scale, zero), forwards = ranges[:2], torch.argsort(factor.backwards)
    by_group = torch.argsort(group_index, stable=True)  # input columns, group by group
    hessian: Callable[[slice], Tensor] = factor.hessian
    if (group_index.diff() < 0).any():
        hessian = hessian(slice(0, len(forwards)))[by_group][:, by_group].__getitem__
    position, groups = forwards[by_group], scale.shape[1]
    in_c = dtype == torch.bfloat16 and matmul.multiplies_bfloat16(scale.device)
    right = _right_sides(settled, zero, factor, group_index, groups, in_c=in_c)
    most = 1 << max((_ELEMENTS // max(len(forwards) // 2, groups**2)).bit_length() - 1, 0)
    fitted = torch.empty_like(scale)
    for rows in (slice(start, start + most) for start in range(0, len(scale), most)):
        values = settled.codes[:, rows].index_select(0, position)  # (K, R)
        normal = _normal_equations(values, None if zero is None else zero[rows], groups, hessian, in_c=in_c)
        # A group whose codes are all zero leaves a row of zeros, which would make the system singular.
        normal.diagonal(dim1=1, dim2=2).add_(1e-6 * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30)
        # solve_ex does not raise an error. Scales that are not finite are replaced by the old scales below.
        fitted[rows] = scale[rows] + torch.linalg.solve_ex(normal, right[rows].unsqueeze(2))[0].squeeze(2)
    return torch.where(torch.isfinite(fitted) & (fitted * scale > 0), fitted, scale)


def _right_sides(
    settled: Settled, zero: Tensor | None, factor: Factor, group_index: Tensor, groups: int, *, in_c: bool
) -> Tensor:
    """Return the right sides D'H e (N, G) of the equations, where e are the errors of a row; the module explains D and
    H.

    H e = L (L'e), and `settled` has L'e, so the errors e are not needed.
    """
    assert settled.errors is not None, "settle_columns must run with keep_errors"
    lower, groups_of = factor.lower, group_index[factor.backwards]
    members = torch.arange(groups, device=lower.device).unsqueeze(1) == groups_of  # (G, K)
    right = torch.zeros(groups, settled.codes.shape[1], device=lower.device)
    zeros = None if zero is None else zero.T.contiguous()
    shape = settled.errors.shape
    packed: matmul.Packed | None = None
    if in_c:
        held = torch.empty(matmul.packed_size(*shape), dtype=torch.bfloat16)
        packed = matmul.Packed(held, shape[0], matmul.packed_size(shape[0], matmul.BLOCK))
    for rows in (slice(start, min(start + _ROWS, len(lower))) for start in range(0, len(lower), _ROWS)):
        if packed is not None:
            matmul.pack_into(packed.part(rows.start, rows.stop), settled.errors[rows].bfloat16())
        part = lower[rows, : rows.stop].to(torch.bfloat16 if in_c else torch.float32, copy=True)
        part[:, rows.start :].tril_()  # values above the diagonal belong to the Hessian
        if packed is None:
            products = part @ settled.errors[: rows.stop]
        else:
            products = torch.zeros(len(part), right.shape[1])
            left = matmul.pack_matrix(part.T.contiguous())
            matmul.add_products(products, left, slice(0, len(part)), packed.part(0, rows.stop))
        values = settled.codes[rows].float()
        values = values if zeros is None else values.sub_(zeros.index_select(0, groups_of[rows]))
        # A matrix product, because index_add_ on a GPU sums in a different order each time.
        right.addmm_(members[:, rows].float(), values.mul_(products))
    return right.T.contiguous()


def _normal_equations(
    codes: Tensor, zero: Tensor | None, groups: int, hessian: Callable[[slice], Tensor], *, in_c: bool
) -> Tensor:
    """Return the matrix D'H D (R, G, G) of the equations of each row; the module explains D and H.

    If `in_c`, C code computes the products from bfloat16 operands. Codes minus their zero point are exact in bfloat16.
    For the Hessian, bfloat16 is precise enough, because D'H D only affects how far the scales move. The scales
    are optimal where `_right_sides` is 0, whatever D'H D is.

    Args:
        codes: (K, R), with the inputs ordered by group.
        zero: zero points (R, G); None for symmetric schemes.
        groups: number of groups G.
        hessian: function that, given a slice, returns these rows of H, with the inputs ordered by group.
        in_c: whether to use C code if possible.
    """
    size, num_rows = len(codes) // groups, codes.shape[1]
    in_c = in_c and size % 8 == 0
    shape, dtype = (len(codes), -(-num_rows // matmul.BLOCK) * matmul.BLOCK), torch.bfloat16 if in_c else torch.float32
    values = torch.zeros(shape, dtype=dtype, device=codes.device)
    for group, own in enumerate(torch.split(values[:, :num_rows], size)):
        part = codes[group * size : (group + 1) * size]
        own.copy_(part if zero is None else part - zero[:, group])
    normal = torch.empty(groups, groups, num_rows, device=codes.device)
    packed = _pack_groups(values, size) if in_c else None
    at_once = max(1, _COLUMNS // size)
    for first in range(0, groups, at_once):
        panel = hessian(slice(first * size, min(first + at_once, groups) * size))
        if packed is None:
            _multiply(values[:, :num_rows], first, panel, normal[first : first + at_once])
        else:
            _multiply_in_c(values, packed, first, panel, normal[first : first + at_once])
    del values, packed
    normal = normal.permute(2, 0, 1).contiguous()
    for group in range(1, groups):  # so far, only the products of each group with itself and later groups are known
        normal[:, group, :group] = normal[:, :group, group]
    return normal


def _multiply(values: Tensor, first: int, panel: Tensor, normal: Tensor) -> None:
    """Compute the rows of D'H D for a few groups: the entries of each group with itself and with all later groups.

    Args:
        values: codes minus zero points, (K, R) float32, with the inputs ordered by group.
        first: number of the first of the groups whose rows are computed.
        panel: rows of the Hessian that belong to the inputs of these groups.
        normal: output, (number of these groups, G, R), contiguous; entries before the diagonal are not written.
    """
    size = len(values) // normal.shape[1]
    step = max(1, _PRODUCT_ELEMENTS // len(values))
    for group, rows in enumerate(torch.split(panel, size)):
        start = (first + group) * size
        for own, out in zip(torch.split(values, step, dim=1), torch.split(normal[group], step, dim=1), strict=True):
            met = rows[:, start:].T @ own[start : start + size]
            torch.sum(met.mul_(own[start:]).view(-1, size, own.shape[1]), 1, out=out[first + group :])


def _pack_groups(values: Tensor, size: int) -> Tensor:
    """Pack a bfloat16 matrix whose rows are inputs, `size` per group; each group becomes one row of the result."""
    parts = torch.split(values, size)
    packed = torch.empty(len(parts), matmul.packed_size(size, values.shape[1]), dtype=torch.bfloat16)
    for part, out in zip(parts, packed, strict=True):
        matmul.pack_matrix(part, out)
    return packed


def _multiply_in_c(values: Tensor, packed: Tensor, first: int, panel: Tensor, normal: Tensor) -> None:
    """Do the same as `_multiply` in C with bfloat16 operands. The columns of `values` are padded to whole blocks,
    and `packed` is the result of `_pack_groups` for `values`.
    """
    count, groups, num_rows = normal.shape
    hessian = _pack_groups(panel.bfloat16(), len(values) // groups)
    native.function("qk_normal_equations", "ppppnnnnnni")(
        values.data_ptr(), packed.data_ptr(), hessian.data_ptr(), normal.data_ptr(), first, count, groups,
        len(values) // groups, num_rows, values.shape[1], torch.get_num_threads(),
    )  # fmt: skip
