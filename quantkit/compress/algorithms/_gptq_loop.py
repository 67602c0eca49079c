"""GPTQ's loop: choose the codes of one input column after another; see `gptq`. The innermost loop runs in C if a C
compiler is available.

A column is *settled* once its codes are chosen. Matrices are transposed, with one row per input column, so that the
inner loop reads contiguous memory. Their rows have the same order as the rows of the factor: the column that is
settled first comes last.
Shapes: N outputs, K inputs, G groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.compress.algorithms._gptq_factor import Factor
from quantkit.compress.calibration.observers import Workspace
from quantkit.numerics import matmul, native
from quantkit.numerics.affine import Ranges, from_codes, to_codes
from quantkit.numerics.dtype import DType
from quantkit.numerics.scheme import WeightScheme

# Number of columns in a run, in torch and in C. A block is settled in runs: inside a run, rank-1 updates stay in the
# cache; between runs, matrix products suffice.
_RUN, _RUN_IN_C = 32, 128
# Number of weight rows that are transposed and reordered at once.
_COPIED = 512


class Settled(NamedTuple):
    """Result of the loop for weights that were processed together.

    Args:
        codes: (K, N) in the number type's storage dtype.
        errors: (K, N) float32, L'e for the errors e of each output, where H = L L'; None if not requested.
    """

    codes: Tensor
    errors: Tensor | None


class Grid(NamedTuple):
    """Grid to which the weights of some columns are rounded.

    Args:
        scales, zeros: (G, N) float32; zeros is None for symmetric types.
        groups: group of each column, (K,) int64, on the CPU. The columns are ordered like the rows of `Factor.lower`.
        dtype: number type.
    """

    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    dtype: DType


def settle_columns(
    weights: list[Tensor],
    factor: Factor,
    group_index: Tensor,
    ranges: Ranges,
    scheme: WeightScheme,
    block: int,
    *,
    keep_errors: bool = False,
    dtype: torch.dtype = torch.float32,
    workspace: Workspace | None = None,
) -> Settled:
    """Choose the codes of one input column after another; each column compensates for the errors of earlier columns.

    Let H = L L', and let e be the error of a weight row w. The output error |L'e|^2 is a sum over columns. The term for
    column i is smallest if the code of column i is rounded from w_i + sum of L_ji e_j / L_ii over the columns j
    that already have codes. Weights that share their inputs are processed as one tall matrix.

    Args:
        weights: (N_i, K) each, any float dtype; not modified.
        factor: factor of the inputs' Hessian.
        group_index: (K,) group of each column.
        ranges: scale and zero point (N, G) float32 of all rows.
        scheme: scheme of the weights, which gives the number type.
        block: number of columns to settle before one matrix product updates all remaining columns.
        keep_errors: whether to return L'e too.
        dtype: dtype of the operands of products. bfloat16 is precise enough if the model's weights are bfloat16 too.
        workspace: memory for `Settled.errors` and temporaries; `Settled.errors` is valid until the workspace is used
            again. None = allocate new memory.
    """
    lower, backwards = factor.lower, factor.backwards
    sizes = [weight.shape[0] for weight in weights]
    workspace, shape = workspace or Workspace(), (len(backwards), sum(sizes))
    rows = workspace.empty(shape, "rows", lower)  # (K, N): weights, replaced by their errors when settled
    for part, weight in zip(torch.split(rows, sizes, dim=1), weights, strict=True):
        for own, some in zip(torch.split(part, _COPIED, dim=1), torch.split(weight, _COPIED), strict=True):
            own.copy_(some.T.contiguous().index_select(0, backwards))
    grid = Grid(
        ranges.scale.T.contiguous(),
        None if ranges.zero_point is None else ranges.zero_point.T.contiguous(),
        group_index[backwards].cpu(),
        scheme.dtype,
    )
    codes = torch.empty(rows.shape, dtype=scheme.dtype.storage, device=lower.device)
    owed = workspace.empty((len(rows) if keep_errors else min(block, len(rows)), rows.shape[1]), "owed", lower)
    if len(rows) % 2 or block % 2:
        dtype = torch.float32  # bfloat16 rows are packed in pairs, block by block
    errors = _Errors(rows, lower, dtype, workspace)
    for stop in range(rows.shape[0], 0, -block):
        start = max(stop - block, 0)
        span = slice(start, stop)
        # The correction of each column of the block, times the column's pivot. Once a column is settled, its row of
        # `due` holds L'e instead.
        due = owed[span] if keep_errors else owed[: stop - start]
        errors.multiply(span, due)
        _settle(rows[span], due, codes[span], lower[span, span], grid._replace(groups=grid.groups[span]))
        errors.take(span)
    return Settled(codes, owed if keep_errors else None)


class _Errors:
    """Errors of the columns whose codes are chosen, as operands of products; see `settle_columns`.

    Args:
        rows: (K, N); rows of settled columns hold errors.
        lower: (K, K), the factor.
        dtype: dtype of the operands.
        workspace: memory for packed copies of the operands.
    """

    def __init__(self, rows: Tensor, lower: Tensor, dtype: torch.dtype, workspace: Workspace) -> None:
        self._rows, self._lower, self._workspace = rows, lower, workspace
        self._packed: matmul.Packed | None = None
        if dtype == torch.bfloat16 and matmul.multiplies_bfloat16(rows.device):
            held = workspace.empty((matmul.packed_size(*rows.shape),), "packed errors", rows, dtype)
            self._packed = matmul.Packed(held, len(rows), matmul.packed_size(len(rows), matmul.BLOCK))

    def multiply(self, span: slice, out: Tensor) -> None:
        """Write to `out` the correction of the columns `span` for the errors of the settled columns, which are all
        columns after `span`: the transposed part of the factor below the block `span`, times these errors.
        """
        below = self._lower[span.stop :, span]
        if self._packed is None or not len(below):
            torch.mm(below.T, self._rows[span.stop :], out=out)
            return
        held = self._workspace.empty((matmul.packed_size(*below.shape),), "packed factor", below, torch.bfloat16)
        right = self._packed.part(span.stop, len(self._rows))
        matmul.add_products(out.zero_(), matmul.pack_matrix(below.bfloat16(), held), slice(0, len(out)), right)

    def take(self, span: slice) -> None:
        """Pack the errors of the columns `span`, which have just been settled, if products use packed operands."""
        if self._packed is not None:
            matmul.pack_into(self._packed.part(span.start, span.stop), self._rows[span].bfloat16())


def _settle(rows: Tensor, due: Tensor, codes: Tensor, lower: Tensor, grid: Grid) -> None:
    """Choose the codes of a block of B columns, run by run.

    Args:
        rows: (B, N) weights, replaced by their errors.
        due: (B, N) correction from the columns that were settled before the block, times the pivots; replaced by L'e.
        codes: (B, N), output.
        lower: (B, B), the block's part of the factor.
        grid: grid of the block's columns.
    """
    in_c = rows.is_cpu and grid.dtype.kind == "int" and codes.dtype == torch.int8 and native.library() is not None
    settle, size = (_settle_run_in_c, _RUN_IN_C) if in_c else (_settle_run, _RUN)
    for stop in range(len(rows), 0, -size):
        start = max(stop - size, 0)
        run = slice(start, stop)
        settle(rows[run], due[run], codes[run], lower[run, run], grid._replace(groups=grid.groups[run]))
        due[:start].addmm_(lower[run, :start].T, rows[run])


def _settle_run(rows: Tensor, due: Tensor, codes: Tensor, lower: Tensor, grid: Grid) -> None:
    """Do the same as `_settle` for a few columns, by rank-1 updates."""
    # As Python numbers: reading them from tensors inside the loop would wait for the device at every column.
    groups, pivots = grid.groups.tolist(), lower.diagonal().tolist()
    chosen = torch.empty(rows.shape, device=rows.device)
    # Unbind before the loop: each view costs as much as the operation on it.
    columns = zip(pivots, groups, *(part.unbind() for part in (rows, due, lower, chosen)), strict=True)
    for row, (pivot, group, error, own, factors, codes_of_row) in reversed(list(enumerate(columns))):
        step, offset = grid.scales[group], None if grid.zeros is None else grid.zeros[group]
        code = to_codes(torch.add(error, own, alpha=1 / pivot), step, offset, grid.dtype)
        codes_of_row.copy_(code)
        error.sub_(from_codes(code, step, offset))
        own.add_(error, alpha=pivot)
        due[:row].addr_(factors[:row], error)
    codes.copy_(chosen)


def _settle_run_in_c(rows: Tensor, due: Tensor, codes: Tensor, lower: Tensor, grid: Grid) -> None:
    """Do the same as `_settle` in C, for a few columns of an integer type that fit into the cache together."""
    zeros = None if grid.zeros is None else grid.zeros.data_ptr()
    failed = native.function("qk_settle", "ppppnpppnnffi", "i")(
        rows.data_ptr(), due.data_ptr(), codes.data_ptr(), lower.data_ptr(), lower.stride(0), grid.scales.data_ptr(),
        zeros, grid.groups.data_ptr(), *rows.shape, grid.dtype.minimum, grid.dtype.maximum, torch.get_num_threads(),
    )  # fmt: skip
    assert not failed, "more columns than C settles at once"
