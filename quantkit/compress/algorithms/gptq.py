"""GPTQ: quantize one input column after another, and let the remaining columns compensate for the error.

The loop has the form of LDLQ, which uses a Cholesky factor of the Hessian. LDLQ computes the same codes as GPTQ's
original form, which first inverts the Hessian. `numerics.affine` chooses ranges; `calibration.observers` collects
statistics.
Shapes: N outputs, K inputs, G groups of g inputs. Matrices are transposed, with one row per input column, so that the
inner loop reads contiguous memory.
Source: Frantar et al. 2022, GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers;
Chee et al. 2023, QuIP: 2-Bit Quantization of Large Language Models With Guarantees, section 3 (the equivalence).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from quantkit.compress.algorithms._gptq_asymmetric import Shift, choose_correction, corrected, shift_of
from quantkit.compress.algorithms._gptq_factor import Factor, add_lower, cholesky_factor
from quantkit.compress.algorithms._gptq_fit import fit_scales
from quantkit.compress.algorithms._gptq_jobs import Job, cut_set, fitting_rounds, is_of_one_expert, owners
from quantkit.compress.algorithms._gptq_loop import settle_columns
from quantkit.compress.algorithms._options import NotNegative, Positive, PositiveShare, Share
from quantkit.compress.algorithms.base import LayerSizes, Step, StepBytes
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import CrossErrors, CrossGram, Gram, Workspace
from quantkit.distributed import rank, share_out, world
from quantkit.machine.memory import release_freed_memory
from quantkit.models.linear_sets import find_expert
from quantkit.numerics import affine
from quantkit.numerics.affine import WeightGrid
from quantkit.numerics.tensor import QuantizedTensor, join_rows

ActOrder = Literal["none", "weight", "group"]

Statistics = dict[tuple[str, ...], tuple[list[Tensor], CrossErrors | None, int]]
"""For each set, the parts that add up to its Hessian, the errors of earlier layers (None = they are ignored), and the
number of tokens over which both are means.
"""

# Automatic damping: the factor of the root of inputs per token, and the limits. Of the fixed dampings 0.01, 0.05 and
# 0.15, the last had the lowest KL on three models of 135 to 500 million parameters with 4,096 tokens, and on one of
# them with 32,768. On models of less than 2 million parameters, 0.01 was better.
_NOISE, _LEAST_DAMPING, _MOST_DAMPING = 0.4, 0.01, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GptqStep(Step):
    """Round one input column after another, and let the remaining columns compensate for the error.

    Args:
        block_size: number of columns to round before one matrix product updates all remaining columns.
        damping: fraction of the Hessian's mean diagonal to add to the diagonal; raised step by step if the Hessian is
            singular. None = 0.4 times the square root of K / T for K inputs and T calibration tokens, limited to
            0.01 to 1. The noise of a Hessian that is measured on T tokens grows with this root.
        act_order: order in which columns are rounded. "weight": columns with the largest inputs first; groups stay in
            place. "group": the same order, and each group consists of columns that follow each other in this order, so
            the format must store the group of each input. "none": from left to right.
        scale_search: whether to search the ranges with the least squared weight error; false = full ranges. Weighting
            the errors by the inputs was worse in measurements, because the loop moves errors to other columns anyway.
        true_sequential: whether to collect the inputs of a set of linears only after the earlier sets of the layer are
            quantized. Use it if `asymmetric_calibration` is above 0; otherwise the KL of two real models at 4 bits was
            1.5 and 1.9 times as large.
        asymmetric_calibration: upper limit, 0 to 1, of the share of earlier layers' errors that this layer compensates
            for (GPTAQ). Cross-validation chooses the share, see `_gptq_asymmetric`. If the limit is above 0, the
            original model runs beside the quantized model, which takes more time and memory.
        refit: number of times to fit the scales to the codes, by least squares on the outputs, and then to choose the
            codes again. Each time costs one more run of GPTQ's loop. Only integer types are refitted.
    """

    fixes_codes: ClassVar[bool] = True
    independent_options: ClassVar[Mapping[str, Any]] = {"true_sequential": False, "asymmetric_calibration": 0.0}

    block_size: Positive = 512
    damping: PositiveShare | None = None
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
        """Whether the step also uses the original model's inputs."""
        return self.asymmetric_calibration > 0

    def extra_bytes(self, sizes: LayerSizes) -> StepBytes:
        """Return the extra memory at the peak, when the Hessian of the widest inputs is factorized; see `StepBytes`."""
        square = sizes.width**2
        # At the peak, Hessian and factor are whole (K, K) matrices. The cross Gram matrix is a third one, but has only
        # one row per output if there are few outputs. Gram matrices of sets that are not solved yet are no wider. Each
        # takes half a matrix, or a whole one if it is summed in two parts.
        cross = sizes.tallest if 2 * sizes.tallest <= square else square
        return StepBytes(statistics=4 * (2 * square + (cross if self.asymmetric_calibration else 0)))

    def apply(self, layer: LayerContext) -> None:
        """Quantize every linear of the layer that has no codes yet; see `Step.apply`."""
        for entries in fitting_rounds(layer, layer.pending(), one_by_one=self.true_sequential):
            sets, workspace = [names for _, names in entries], Workspace()
            errors = {
                names[0]: CrossGram([layer.weight(name) for name in names], workspace)
                for names in sets
                # An expert may see different tokens than in the original model, so its inputs cannot be compared.
                if self.asymmetric_calibration and find_expert(names[0]) is None
            }
            grams = {
                names[0]: Gram(
                    layer.weight(names[0]).shape[1],
                    layer.device,
                    parts=2 if names[0] in errors else 1,
                    split=not is_of_one_expert(names),
                    workspace=workspace,
                )
                for names in sets
            }
            grams = layer.observe(grams, errors)
            del workspace
            statistics: Statistics = {}
            for names in sets:
                gram = grams.pop(names[0])
                if gram.is_split or layer.owner(names[0]) == rank():
                    cross = errors.pop(names[0], None)
                    statistics[names] = gram.finish(), cross.errors() if cross else None, gram.num_tokens
            release_freed_memory()  # memory of the sums, which would otherwise be held beside the factor
            self._quantize_sets(layer, sets, statistics)
            release_freed_memory()

    def _quantize_sets(self, layer: LayerContext, sets: list[tuple[str, ...]], statistics: Statistics) -> None:
        """Quantize sets of linears; the linears of a set share a Hessian. Each set is cut into jobs, and exactly one
        process solves each job.
        """
        jobs = [job for names in sets for job in cut_set(layer, names)]
        factors: dict[tuple[str, ...], tuple[Factor, Shift | None]] = {}  # only of the set that is being solved
        workspace = Workspace()

        def solve(job: Job) -> tuple[list[QuantizedTensor], float]:
            if job.set not in factors:
                factors.clear()
                workspace.clear()
                # Removed from `statistics`, so that a set's matrices are freed once the set's linears are solved.
                parts, errors, num_tokens = statistics.pop(job.set)
                shift = None
                chosen = choose_correction(parts, errors.halves, self.asymmetric_calibration) if errors else None
                hessian = parts.pop(0)
                while parts:
                    add_lower(hessian, parts.pop())
                if errors and chosen:
                    shift = shift_of(errors, hessian, chosen, by_all=job.set in common)
                factors[job.set] = self._factor(hessian, num_tokens), shift
            factor, shift = factors[job.set]
            if layer.device.type == "cpu":  # the last job freed its memory in pieces that do not fit this job
                release_freed_memory()
            return self._solve_job(layer, job, factor, shift, workspace), factor.raised

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
            layer.chosen.notes.append(f"{listed}: damping raised to {damping:.3g} for a nearly singular Hessian")
        factors.clear()
        layer.commit({name: join_rows(made) for name, made in parts.items()})

    def _factor(self, hessian: Tensor, num_tokens: int) -> Factor:
        # Stable, so that inputs of equal magnitude have the same order in every run.
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        if self.act_order == "none":
            order = torch.arange(len(order), device=order.device)
        damping = self.damping
        if damping is None:
            noise = _NOISE * math.sqrt(len(hessian) / max(1, num_tokens))
            damping = min(max(_LEAST_DAMPING, noise), _MOST_DAMPING)
        return cholesky_factor(hessian, order, damping)

    def _solve_job(
        self, layer: LayerContext, job: Job, factor: Factor, shift: Shift | None, workspace: Workspace
    ) -> list[QuantizedTensor]:
        weights = [layer.weight(name)[rows] for name, rows in job.rows]
        dtype = weights[0].dtype
        if isinstance(shift, tuple):  # one matrix per linear of the set, with one row per output
            shift = tuple(shift[job.set.index(name)][rows] for name, rows in job.rows)
        weights = weights if shift is None else corrected(weights, shift)
        return self._solve(weights, [layer.grid(name) for name, _ in job.rows], factor, dtype, workspace)

    def _solve(
        self, weights: list[Tensor], grids: list[WeightGrid], factor: Factor, dtype: torch.dtype, workspace: Workspace
    ) -> list[QuantizedTensor]:
        """Choose the codes of weights (N_i, K) that have the same scheme and input. The weights are not modified.
        `dtype` is the dtype of the model's weights.
        """
        scheme, width = grids[0].scheme, weights[0].shape[1]
        index = torch.arange(width, device=factor.lower.device) // scheme.group_width(width)
        columns: slice | Tensor = slice(None)
        reordered = self.act_order == "group" and scheme.group_size is not None
        if reordered:
            # Columns that are settled one after another form a group; the index gives the group of each input.
            columns = factor.backwards.flip(0)
            index = torch.empty_like(index).scatter_(0, columns, index)
        choose = affine.search_parameters if self.scale_search else affine.minmax_parameters
        chosen = [choose(weight[:, columns], grid) for weight, grid in zip(weights, grids, strict=True)]
        sizes, ranges = [len(weight) for weight in weights], affine.join_ranges(chosen)
        # A fit has one unknown per row and group, so it cannot find scales that several rows share.
        fits = self.refit if scheme.dtype.kind == "int" and scheme.block_rows == 1 else 0
        for left in range(fits, -1, -1):
            settled = settle_columns(
                weights, factor, index, ranges, scheme, self.block_size,
                keep_errors=left > 0, dtype=dtype, workspace=workspace,
            )  # fmt: skip
            if left:
                fitted = torch.split(fit_scales(settled, ranges, factor, index, dtype), sizes)
                refit = zip(ranges.split(sizes), fitted, grids, strict=True)
                ranges = affine.join_ranges([affine.rescaled(*each) for each in refit])
        forwards = torch.argsort(factor.backwards)
        codes = (part.index_select(0, forwards).T.contiguous() for part in torch.split(settled.codes, sizes, dim=1))
        return [
            affine.assemble(code, own, grid, index if reordered else None)
            for code, own, grid in zip(codes, ranges.split(sizes), grids, strict=True)
        ]


STEP = GptqStep
