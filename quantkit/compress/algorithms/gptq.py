"""GPTQ: quantize one input column after another and let the columns still to come make up for the error.

The loop is in the form of LDLQ, which gives the same codes from a Cholesky factor of the Hessian itself, where GPTQ's
own form inverts it first. Not here: ranges of rounding (numerics.affine), statistics (calibration.observers).
Shapes: N outputs, K inputs, G groups of g inputs. Matrices are kept transposed, a row per input column, so that the
inner loop touches contiguous memory.
Source: Frantar et al. 2022, GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers;
Chee et al. 2023, QuIP: 2-Bit Quantization of Large Language Models With Guarantees, section 3 (the equivalence).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantkit.checkpoints.memory import release_freed_memory
from quantkit.compress.algorithms._gptq_factor import Factor, cholesky_factor
from quantkit.compress.algorithms._gptq_jobs import Job, cut_set, fitting_rounds, is_of_one_expert, owners
from quantkit.compress.algorithms._options import NotNegative, Positive, PositiveShare, Share
from quantkit.compress.algorithms.base import LayerSizes, StepBytes
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import CrossGram, Gram, Workspace
from quantkit.distributed import assign, fill, rank, share_out, world
from quantkit.models.linear_sets import find_expert
from quantkit.numerics import affine
from quantkit.numerics.affine import Ranges, WeightGrid, from_codes, to_codes
from quantkit.numerics.scales import round_scale
from quantkit.numerics.scheme import WeightScheme
from quantkit.numerics.tensor import QuantizedTensor, join_rows

ActOrder = Literal["none", "weight", "group"]

# Columns inside a block are settled in smaller runs: rank-1 updates stay in cache, the rest is matrix products.
_RUN = 32
# Elements of weights, of the products of codes and Hessian, and columns of the Hessian held at once while scales are
# fitted.
_FIT_ELEMENTS, _PRODUCT_ELEMENTS, _FIT_COLUMNS = 1 << 22, 1 << 21, 512
# Rows that are divided by a Hessian at once, and columns of its factor: large products, small triangles.
_DIVIDED_ROWS, _DIVIDED_COLUMNS = 1024, 256
# Rows of weights copied at once, transposed and into another order.
_COPIED = 512

Errors = Tensor | tuple[Tensor, ...]
"""Of a set: see `CrossGram.errors`."""

Statistics = dict[tuple[str, ...], tuple[Tensor, Errors | None]]
"""Of sets: the Hessian, and what the layers before have got wrong, where that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptqStep:
    """Column-by-column rounding with error compensation.

    Args:
        block_size: columns settled before the rest of the matrix is updated, in one product.
        damping: added to the Hessian's diagonal, as a fraction of its mean; raised step by step if it is singular.
        act_order: "weight" settles the columns with the largest inputs first and keeps the groups in place,
            "group" also forms the groups in that order (the format must store an index), "none" goes left to right.
        scale_search: ranges by least squared error; false takes the covering range. Weighting the errors by the
            inputs was measured to be worse: the loop moves them to other columns anyway.
        true_sequential: each set of linears sees inputs made with the sets before it already quantized; a little
            better at 3 bits and fewer.
        asymmetric_calibration: share, 0 to 1, of what the layers before have got wrong that this one's target
            makes up for (GPTAQ); above 0 the original model runs beside the quantized one, for more time and
            memory.
        refit: how often the scales of integers are fitted to the codes by least squares on the outputs, and the codes
            chosen again; each time costs one more run of the loop.
    """

    block_size: Positive = 128
    damping: PositiveShare = 0.01
    act_order: ActOrder = "weight"
    scale_search: bool = True
    true_sequential: bool = False
    refit: NotNegative = 1
    asymmetric_calibration: Share = 0.0

    @property
    def reorders_groups(self) -> bool:
        """Whether the format must be able to store which group each input belongs to."""
        return self.act_order == "group"

    @property
    def needs_original(self) -> bool:
        """Whether the inputs of the original model are looked at too."""
        return self.asymmetric_calibration > 0

    def extra_bytes(self, sizes: LayerSizes) -> StepBytes:
        """Where most is held, the factorising of the widest inputs' Hessian; see `Step`."""
        square = sizes.width**2
        # Hessian and factor, both whole for that long, beside the cross Gram, which has a row for each output where
        # these are few. Gram matrices that wait are half, and of inputs that are no wider.
        cross = sizes.tallest if 2 * sizes.tallest <= square else square
        return StepBytes(statistics=4 * (2 * square + (cross if self.asymmetric_calibration else 0)))

    def apply(self, layer: LayerContext) -> None:
        """Quantize every linear of the layer that has no codes yet; see `Step.apply`."""
        for entries in fitting_rounds(layer, layer.pending(), one_by_one=self.true_sequential):
            sets, workspace = [names for _, names in entries], Workspace()
            grams = {
                names[0]: Gram(
                    layer.weight(names[0]).shape[1],
                    layer.device,
                    split=not is_of_one_expert(names),
                    workspace=workspace,
                )
                for names in sets
            }
            errors = {
                names[0]: CrossGram([layer.weight(name) for name in names], workspace)
                for names in sets
                # An expert may see other tokens than it used to, so its inputs cannot be compared.
                if self.asymmetric_calibration and find_expert(names[0]) is None
            }
            layer.observe(grams, errors)
            del workspace
            statistics: Statistics = {}
            for names in sets:
                gram = grams.pop(names[0])
                if gram.is_split or layer.owner(names[0]) == rank():
                    statistics[names] = gram.finish(), errors.pop(names[0]).errors() if names[0] in errors else None
            release_freed_memory()  # of the sums, which would lie beside the factor
            self._quantize_sets(layer, sets, statistics)
            release_freed_memory()

    def _quantize_sets(self, layer: LayerContext, sets: list[tuple[str, ...]], statistics: Statistics) -> None:
        """Linears that share inputs share the Hessian; what is solved together, one process solves."""
        jobs = [job for names in sets for job in cut_set(layer, names)]
        factors: dict[tuple[str, ...], tuple[Factor, Errors | None]] = {}  # of the set that is being solved

        def solve(job: Job) -> tuple[list[QuantizedTensor], float]:
            if job.set not in factors:
                factors.clear()
                # Taken out, so that a set's matrices are free again once its linears are settled.
                hessian, error = statistics.pop(job.set)
                factor = self._factor(hessian)
                del hessian
                if isinstance(error, Tensor):
                    divide = shared_correction if job.set in common else correction
                    error = divide(error, factor, self.asymmetric_calibration)
                factors[job.set] = factor, error
            factor, error = factors[job.set]
            if layer.device.type == "cpu":  # what the job before took lies in pieces that do not fit this one's
                release_freed_memory()
            return self._solve_job(layer, job, factor, error), factor.raised

        solvers = owners(layer, jobs)
        own = [{job.set for job, solver in zip(jobs, solvers, strict=True) if solver == n} for n in range(world())]
        common = set.intersection(*own)
        for names in statistics.keys() - own[rank()]:
            del statistics[names]
        solved = share_out(jobs, solve, owners=solvers)
        parts: dict[str, list[QuantizedTensor]] = {}
        raised: dict[tuple[str, ...], float] = {}
        for job, (made, damping) in zip(jobs, solved, strict=True):
            raised |= {job.set: damping} if damping else {}
            for (name, _), part in zip(job.rows, made, strict=True):
                parts.setdefault(name, []).append(part)
        for names, damping in raised.items():
            listed = ", ".join(names if len(names) <= 4 else (*names[:3], "..."))
            layer.chosen.notes.append(f"{listed}: damping raised to {damping:.3g}, the Hessian is nearly singular")
        factors.clear()
        layer.commit({name: join_rows(made) for name, made in parts.items()})

    def _factor(self, hessian: Tensor) -> Factor:
        # Stable, so that inputs of equal size keep their order from run to run.
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        if self.act_order == "none":
            order = torch.arange(len(order), device=order.device)
        return cholesky_factor(hessian, order, self.damping)

    def _solve_job(self, layer: LayerContext, job: Job, factor: Factor, error: Errors | None) -> list[QuantizedTensor]:
        weights = [layer.weight(name)[rows] for name, rows in job.rows]
        if isinstance(error, tuple):  # of outputs, each of which belongs to one linear
            own = (error[job.set.index(name)][rows] for name, rows in job.rows)
            error = tuple(correction(part, factor, self.asymmetric_calibration) for part in own)
        weights = weights if error is None else corrected(weights, error)
        return self._solve(weights, [layer.grid(name) for name, _ in job.rows], factor)

    def _solve(self, weights: list[Tensor], grids: list[WeightGrid], factor: Factor) -> list[QuantizedTensor]:
        """Codes of (N, K) weights of one scheme and input, which are not modified."""
        scheme, width = grids[0].scheme, weights[0].shape[1]
        index = torch.arange(width, device=factor.lower.device) // scheme.group_width(width)
        columns: slice | Tensor = slice(None)
        reordered = self.act_order == "group" and scheme.group_size is not None
        if reordered:
            # Groups are consecutive columns in the order of settling; the index says which group each input has got.
            columns = factor.backwards.flip(0)
            index = torch.empty_like(index).scatter_(0, columns, index)
        choose = affine.search_parameters if self.scale_search else affine.minmax_parameters
        ranges = [choose(weight[:, columns], grid) for weight, grid in zip(weights, grids, strict=True)]
        codes = settle_columns(weights, factor, index, ranges, scheme, self.block_size)
        # Fits have one unknown per row and group, which scales shared by rows do not have.
        for _ in range(self.refit if scheme.dtype.kind == "int" and scheme.block_rows == 1 else 0):
            ranges = [
                Ranges(
                    affine.on_rows(fit_scales(weight, code, old, factor, index, grid.scale_dtype), grid), old.zero_point
                )
                for weight, code, old, grid in zip(weights, codes, ranges, grids, strict=True)
            ]
            codes = settle_columns(weights, factor, index, ranges, scheme, self.block_size)
        return [
            affine.assemble(code, of_groups, grid, index if reordered else None)
            for code, of_groups, grid in zip(codes, ranges, grids, strict=True)
        ]


def settle_columns(
    weights: list[Tensor], factor: Factor, group_index: Tensor, ranges: list[Ranges], scheme: WeightScheme, block: int
) -> list[Tensor]:
    """The GPTQ loop: settle columns one by one, each making up for the errors of those before it.

    With H = L L' and e the error of a row of weights, its output error |L'e|^2 is a sum over columns; term i is least
    where the weight wanted at i is w_i plus the sum over settled j of L_ji e_j / L_ii. Weights that share their inputs
    go through the loop as one tall matrix.

    Args:
        weights: (N_i, K) each, any float dtype; not modified.
        factor: of the inputs' Hessian.
        group_index: (K,) group of each column.
        ranges: scale and zero point (N_i, G) float32 of each weight.
        scheme: number type.
        block: columns settled before those that follow are updated, in one product.
    Returns:
        (N_i, K) codes in the number type's storage dtype, one per weight.
    """
    lower, backwards = factor.lower, factor.backwards
    sizes = [weight.shape[0] for weight in weights]
    rows = torch.empty(len(backwards), sum(sizes), device=lower.device)  # (K, N): weights, once settled their errors
    for part, weight in zip(torch.split(rows, sizes, dim=1), weights, strict=True):
        for own, some in zip(torch.split(part, _COPIED, dim=1), torch.split(weight, _COPIED), strict=True):
            own.copy_(some.T.contiguous().index_select(0, backwards))
    scales = torch.cat([scale for scale, _ in ranges]).T.contiguous()  # (G, N)
    zeros = None if scheme.symmetric else torch.cat([z for _, z in ranges if z is not None]).T.contiguous()
    # As Python numbers: reading them from tensors inside the loop would wait for the device at every column.
    groups = group_index[backwards].tolist()
    pivots = lower.diagonal().tolist()
    codes = torch.empty(rows.shape, dtype=scheme.dtype.storage, device=lower.device)
    chosen = torch.empty(_RUN, rows.shape[1], device=lower.device)
    for stop in range(rows.shape[0], 0, -block):
        start = max(stop - block, 0)
        owed = lower[stop:, start:stop].T @ rows[stop:]  # what each column of the block makes up for, times its pivot
        for run_stop in range(stop, start, -_RUN):
            run_start = max(run_stop - _RUN, start)
            run, due = slice(run_start, run_stop), owed[run_start - start : run_stop - start]
            # Taken apart here: each view costs as much as what is done with it.
            views = (part.unbind() for part in (rows[run], due, lower[run, run], chosen[: run_stop - run_start]))
            columns = zip(pivots[run], groups[run], *views, strict=True)
            for row, (pivot, group, error, own, factors, codes_of_row) in reversed(list(enumerate(columns))):
                step, offset = scales[group], None if zeros is None else zeros[group]
                code = to_codes(torch.add(error, own, alpha=1 / pivot), step, offset, scheme.dtype)
                codes_of_row.copy_(code)
                error.sub_(from_codes(code, step, offset))
                due[:row].addr_(factors[:row], error)
            codes[run] = chosen[: run_stop - run_start]
            owed[: run_start - start].addmm_(lower[run, start:run_start].T, rows[run])
    forwards = torch.argsort(backwards)
    return [part.index_select(0, forwards).T.contiguous() for part in torch.split(codes, sizes, dim=1)]


def corrected(weights: list[Tensor], shift: Errors) -> list[Tensor]:
    """The weights that, fed what the layer sees now, come nearest to the outputs of the original model.

    Least |V X - W O|^2 over V is at V = W + W (O - X) X' (X X')^-1; X X' is damped as for the loop that follows.

    Args:
        weights: (N_i, K) W each; not modified.
        shift: (K, K) (O - X) X' (X X')^-1, see `correction`, or (N_i, K) each weight times it, which is used up.
    Returns:
        (N_i, K) float32 each.
    Source: Li et al. 2025, GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration, section 4, whose
    loop spreads the same correction over its columns.
    """
    if not isinstance(shift, Tensor):
        return [own.add_(weight) for own, weight in zip(shift, weights, strict=True)]
    return [torch.addmm(values, values, shift) for values in (weight.float() for weight in weights)]


def correction(error: Tensor, factor: Factor, strength: float) -> Tensor:
    """A share of (N, K) error (X X')^-1, in its place; the factor is of X X'."""
    return _divide(error, factor).mul_(strength)


def shared_correction(error: Tensor, factor: Factor, strength: float) -> Tensor:
    """`correction` of what all processes have, by all of them at once."""
    parts = torch.split(error, _DIVIDED_ROWS)
    owned = list(zip(parts, assign([len(part) for part in parts]), strict=True))
    for part, owner in owned:
        if owner == rank():
            correction(part, factor, strength)
    for part, owner in owned:
        fill(part, owner)
    return error


def _divide(matrix: Tensor, factor: Factor) -> Tensor:
    """(N, K) matrix H^-1, in its place: by products for the most part, and without LAPACK's copy of the factor."""
    lower, width = factor.lower, len(factor.lower)
    blocks = [slice(start, min(start + _DIVIDED_COLUMNS, width)) for start in range(0, width, _DIVIDED_COLUMNS)]
    forwards = torch.argsort(factor.backwards)
    for rows in torch.split(matrix, _DIVIDED_ROWS):
        values = rows.index_select(1, factor.backwards)  # the factor is of the reordered Hessian
        for own in blocks:
            block = values[:, own].addmm_(values[:, : own.start], lower[own, : own.start].T, alpha=-1)
            block.copy_(torch.linalg.solve_triangular(lower[own, own].T, block, upper=True, left=False))
        for own in reversed(blocks):
            block = values[:, own].addmm_(values[:, own.stop :], lower[own.stop :, own], alpha=-1)
            block.copy_(torch.linalg.solve_triangular(lower[own, own], block, upper=False, left=False))
        torch.index_select(values, 1, forwards, out=rows)
    return matrix


def fit_scales(
    weight: Tensor, codes: Tensor, ranges: Ranges, factor: Factor, group_index: Tensor, scale_dtype: torch.dtype
) -> Tensor:
    """The scales of a row's groups that together bring the outputs of given codes nearest to those of the weights.

    The output error of a row is (w - D s)' H (w - D s), where column j of D holds the codes of group j: least squares
    with one unknown per group. Solved for the change of the scales, which only the present error asks for.

    Args:
        weight, codes: (N, K); not modified.
        ranges: scale and zero point (N, G) float32 that the codes were made with.
        factor: of the inputs' Hessian.
        group_index: (K,) group of each column.
        scale_dtype: dtype in which scales are stored.
    Returns:
        (N, G) float32 with values of `scale_dtype`; a scale whose fit changes sign keeps its value.
    """
    scale, zero = ranges
    groups, width = scale.shape[1], weight.shape[1]
    hessian: Callable[[slice], Tensor] = factor.hessian
    columns: slice | Tensor = slice(None)
    if (group_index.diff() < 0).any():
        columns = torch.argsort(group_index, stable=True)  # group by group
        hessian = hessian(slice(0, width))[columns][:, columns].__getitem__
    step = _power_of_two(_FIT_ELEMENTS // max(width, groups**2))
    fitted = torch.empty_like(scale)
    for start in range(0, len(scale), step):
        rows = slice(start, start + step)
        values = codes[rows][:, columns].float().view(-1, groups, width // groups)  # (R, G, g)
        if zero is not None:
            values -= zero[rows].unsqueeze(2)
        error = (values * scale[rows].unsqueeze(2)).flatten(1)
        torch.sub(weight[rows][:, columns], error, out=error)
        normal, right = _normal_equations(values, error, hessian)
        # A group whose codes are all zero leaves a row of zeros, with which the system would be singular.
        normal.diagonal(dim1=1, dim2=2).add_(1e-6 * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30)
        # solve_ex raises nothing: a row whose solution is not finite keeps its scales below.
        fitted[rows] = scale[rows] + torch.linalg.solve_ex(normal, right.unsqueeze(2))[0].squeeze(2)
    usable = torch.isfinite(fitted) & (fitted * scale > 0)
    return round_scale(torch.where(usable, fitted, scale), scale_dtype)


def _power_of_two(most: int) -> int:
    """The largest that is not more, but at least 1."""
    return 1 << max(most.bit_length() - 1, 0)


def _normal_equations(values: Tensor, error: Tensor, hessian: Callable[[slice], Tensor]) -> tuple[Tensor, Tensor]:
    """D'H D (R, G, G) and D'H e (R, G) of each row.

    Args:
        values: (R, G, g) codes less their zero points.
        error: (R, K) e, group by group as everything here.
        hessian: gives rows of H.
    """
    num_rows, groups, size = values.shape
    normal = torch.empty(num_rows, groups, groups, device=values.device)
    right = torch.empty(num_rows, groups, device=values.device)
    # Rows by powers of two and columns by the panel: torch keeps 256 KiB for each shape of a product.
    at_once, few = max(1, _FIT_COLUMNS // size), _power_of_two(_PRODUCT_ELEMENTS // max(groups * size, groups**2))
    workspace = torch.empty(min(few, num_rows) * groups * size, device=values.device)
    for first in range(0, groups, at_once):
        panel = slice(first * size, min(first + at_once, groups) * size)
        of_panel = hessian(panel)
        for start in range(0, num_rows, few):
            part, of_part = slice(start, start + few), values[start : start + few]
            own, others = of_part[:, first : first + at_once], of_part[:, first:]
            met = torch.mm(error[part], of_panel.T, out=workspace[: own.numel()].view(len(own), -1))
            torch.sum(met.view(own.shape).mul_(own), 2, out=right[part, first : first + at_once])
            for group, rows in enumerate(torch.split(of_panel, size), first):
                columns = rows[:, first * size :]
                met = torch.mm(of_part[:, group], columns, out=workspace[: others.numel()].view(len(of_part), -1))
                # Symmetric: a group meets itself and those that follow.
                sums = met.view(others.shape).mul_(others)[:, group - first :].sum(2)
                normal[part, group, group:] = normal[part, group:, group] = sums
    return normal, right


STEP = GptqStep
