"""GPTQ: quantize one input column after another and let the columns still to come make up for the error.

The loop is in the form of LDLQ, which gives the same codes from a Cholesky factor of the Hessian itself, where GPTQ's
own form inverts it first. Not here: ranges of rounding (numerics.affine), statistics (calibration.observers).
Shapes: N outputs, K inputs, G groups of g inputs. Matrices are kept transposed, a row per input column, so that the
inner loop touches contiguous memory.
Source: Frantar et al. 2022, GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers;
Chee et al. 2023, QuIP: 2-Bit Quantization of Large Language Models With Guarantees, section 3 (the equivalence).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from quantkit.compress.algorithms._gptq_factor import Factor, cholesky_factor
from quantkit.compress.algorithms._gptq_fit import fit_scales
from quantkit.compress.algorithms._gptq_jobs import Job, cut_set, fitting_rounds, is_of_one_expert, owners
from quantkit.compress.algorithms._gptq_loop import settle_columns
from quantkit.compress.algorithms._options import NotNegative, Positive, PositiveShare, Share
from quantkit.compress.algorithms.base import LayerSizes, Step, StepBytes
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import CrossGram, Gram, Workspace
from quantkit.distributed import assign_work, fill, rank, share_out, world
from quantkit.machine.memory import release_freed_memory
from quantkit.models.linear_sets import find_expert
from quantkit.numerics import affine
from quantkit.numerics.affine import WeightGrid
from quantkit.numerics.matmul import add_products, multiplies_bfloat16, pack_matrix
from quantkit.numerics.tensor import QuantizedTensor, join_rows

ActOrder = Literal["none", "weight", "group"]

# Rows that are divided by a Hessian at once, and columns of its factor: large products, small triangles.
_DIVIDED_ROWS, _DIVIDED_COLUMNS = 1024, 256

Errors = Tensor | tuple[Tensor, ...]
"""Of a set: see `CrossGram.errors`."""

Statistics = dict[tuple[str, ...], tuple[Tensor, Errors | None]]
"""Of sets: the Hessian, and what the layers before have got wrong, where that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptqStep(Step):
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

    fixes_codes: ClassVar[bool] = True
    independent_options: ClassVar[Mapping[str, Any]] = {"true_sequential": False, "asymmetric_calibration": 0.0}

    block_size: Positive = 512
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
        """Memory at the peak, the factorising of the widest inputs' Hessian; see `Step`."""
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
            grams = layer.observe(grams, errors)
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
        workspace = Workspace()

        def solve(job: Job) -> tuple[list[QuantizedTensor], float]:
            if job.set not in factors:
                factors.clear()
                workspace.clear()
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
            return self._solve_job(layer, job, factor, error, workspace), factor.raised

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

    def _solve_job(
        self, layer: LayerContext, job: Job, factor: Factor, error: Errors | None, workspace: Workspace
    ) -> list[QuantizedTensor]:
        weights = [layer.weight(name)[rows] for name, rows in job.rows]
        dtype = weights[0].dtype
        if isinstance(error, tuple):  # of outputs, each of which belongs to one linear
            own = (error[job.set.index(name)][rows] for name, rows in job.rows)
            error = tuple(correction(part, factor, self.asymmetric_calibration) for part in own)
        weights = weights if error is None else corrected(weights, error)
        return self._solve(weights, [layer.grid(name) for name, _ in job.rows], factor, dtype, workspace)

    def _solve(
        self,
        weights: list[Tensor],
        grids: list[WeightGrid],
        factor: Factor,
        dtype: torch.dtype,
        workspace: Workspace,
    ) -> list[QuantizedTensor]:
        """Codes of (N, K) weights of one scheme and input, which are not modified; `dtype` is the model's."""
        scheme, width = grids[0].scheme, weights[0].shape[1]
        index = torch.arange(width, device=factor.lower.device) // scheme.group_width(width)
        columns: slice | Tensor = slice(None)
        reordered = self.act_order == "group" and scheme.group_size is not None
        if reordered:
            # Groups are consecutive columns in the order of settling; the index says which group each input has got.
            columns = factor.backwards.flip(0)
            index = torch.empty_like(index).scatter_(0, columns, index)
        choose = affine.search_parameters if self.scale_search else affine.minmax_parameters
        chosen = [choose(weight[:, columns], grid) for weight, grid in zip(weights, grids, strict=True)]
        sizes, ranges = [len(weight) for weight in weights], affine.join_ranges(chosen)
        # Fits have one unknown per row and group, which scales shared by rows do not have.
        fits = self.refit if scheme.dtype.kind == "int" and scheme.block_rows == 1 else 0
        for left in range(fits, -1, -1):
            settled = settle_columns(
                weights, factor, index, ranges, scheme, self.block_size,
                keep_errors=left > 0, dtype=dtype, workspace=workspace,
            )  # fmt: skip
            if left:
                fitted = torch.split(fit_scales(settled, ranges, factor, index, dtype), sizes)
                stored = (affine.stored(scale, grid) for scale, grid in zip(fitted, grids, strict=True))
                ranges = ranges._replace(scale=torch.cat(list(stored)))
        forwards = torch.argsort(factor.backwards)
        codes = (part.index_select(0, forwards).T.contiguous() for part in torch.split(settled.codes, sizes, dim=1))
        return [
            affine.assemble(code, own, grid, index if reordered else None)
            for code, own, grid in zip(codes, ranges.split(sizes), grids, strict=True)
        ]


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
    if weights[0].dtype != torch.bfloat16 or not multiplies_bfloat16(shift.device):
        return [torch.addmm(values, values, shift) for values in (weight.float() for weight in weights)]
    packed, targets = pack_matrix(shift.bfloat16()), [weight.float() for weight in weights]
    for weight, target in zip(weights, targets, strict=True):
        add_products(target, pack_matrix(weight.T.contiguous()), slice(0, len(weight)), packed)
    return targets


def correction(error: Tensor, factor: Factor, strength: float) -> Tensor:
    """A share of (N, K) error (X X')^-1, in its place; the factor is of X X'."""
    return _divide(error, factor).mul_(strength)


def shared_correction(error: Tensor, factor: Factor, strength: float) -> Tensor:
    """`correction` of what all processes have, by all of them at once."""
    parts = torch.split(error, _DIVIDED_ROWS)
    owned = list(zip(parts, assign_work([len(part) for part in parts]), strict=True))
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


STEP = GptqStep
