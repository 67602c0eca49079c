"""Summarize latencies: percentiles, medians, and polynomial fits with standard errors.

Percentiles are interpolated linearly between order statistics (Hyndman and Fan's type 7, the default of NumPy): for n
sorted values, the p-th percentile lies at position (n - 1) p / 100, counted from 0. With fewer than 100 values, the
99th percentile lies between the two largest.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.results import BenchmarkRun

Points = Sequence[tuple[float, float]]

OUTLIER_DEVIATIONS = 5.0  # larger residuals, in robust standard deviations, are stalls
NORMAL_PER_MAD = 1.4826  # standard deviation over median absolute deviation, for normal residuals


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of values: `percent` % of the values lie below it. It is interpolated linearly.

    Raises:
        ValueError: there are no values, or the percentage is outside 0..100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(
            f"a percentile needs values and 0 <= percent <= 100; found {len(values)} values and percent {percent}"
        )
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles ("p50", "p90", "p99"), "mean" and number ("count") of the values; None without values."""
    if not values:
        return None
    percentiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {**percentiles, "mean": math.fsum(values) / len(values), "count": len(values)}


def median(values: Sequence[float]) -> float | None:
    """Return the median; None without values."""
    return statistics.median(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolynomialFit:
    """Least-squares fit y = sum of coefficients[i] * x^i.

    Args:
        coefficients: coefficients, the constant first.
        standard_errors: standard error of each coefficient.
        residual: standard deviation of the points around the fit.
        num_points: number of points that were fitted.
        num_dropped: number of points left out as stalls.
    """

    coefficients: tuple[float, ...]
    standard_errors: tuple[float, ...]
    residual: float
    num_points: int
    num_dropped: int

    def at(self, x: float) -> float:
        """Return the fitted value at `x`."""
        return math.fsum(c * x**i for i, c in enumerate(self.coefficients))


def fit_polynomial(points: Points, *, degree: int = 1) -> PolynomialFit | None:
    """Fit a polynomial to points, e.g. ITL = a + b * context (degree 1), or TTFT by prompt length (degree 2).

    Points more than 5 robust standard deviations above the fit are treated as stalls: the others are fitted again.

    Args:
        points: (x, y) of each point.
        degree: degree of the polynomial.
    Returns:
        The fit; None if there are too few points, or too few different x, to estimate standard errors.
    """
    if not _are_enough(points, degree):
        return None
    first = least_squares(points, degree)
    residuals = [y - first.at(x) for x, y in points]
    centre = statistics.median(residuals)
    spread = NORMAL_PER_MAD * statistics.median(abs(r - centre) for r in residuals)
    # If more than half of the points lie on the curve, the spread is zero, and a finite limit would drop all others.
    limit = centre + OUTLIER_DEVIATIONS * spread if spread else math.inf
    # Drop only points above the curve: a stall adds time, and nothing makes a step faster.
    kept = [point for point, residual in zip(points, residuals, strict=True) if residual <= limit]
    if len(kept) == len(points) or not _are_enough(kept, degree):
        return first
    return least_squares(kept, degree, num_dropped=len(points) - len(kept))


def _are_enough(points: Points, degree: int) -> bool:
    # At least one point more than coefficients: otherwise no residual is left to estimate errors from.
    return len(points) >= degree + 2 and len({x for x, _ in points}) > degree


def fit_gaps(run: BenchmarkRun) -> PolynomialFit | None:
    """Fit ITL = a + b * context to the gaps between tokens of one run; see `fit_polynomial`."""
    return fit_polynomial(run.context_gaps)


def least_squares(points: Points, degree: int, *, num_dropped: int = 0) -> PolynomialFit:
    """Fit a polynomial to all points; at least `degree` + 2 points and `degree` + 1 different x are needed."""
    size, scale = degree + 1, max(abs(x) for x, _ in points) or 1.0
    powers = [[(x / scale) ** i for i in range(size)] for x, _ in points]  # scaled, for well-conditioned equations
    rows = [(row, y) for row, (_, y) in zip(powers, points, strict=True)]
    normal = [[math.fsum(row[i] * row[j] for row in powers) for j in range(size)] for i in range(size)]
    moment = [math.fsum(row[i] * y for row, y in rows) for i in range(size)]
    inverse = _invert(normal)
    scaled = [math.fsum(inverse[i][j] * moment[j] for j in range(size)) for i in range(size)]
    squares = math.fsum((y - math.fsum(c * p for c, p in zip(scaled, row, strict=True))) ** 2 for row, y in rows)
    variance = squares / (len(points) - size)
    return PolynomialFit(
        coefficients=tuple(c / scale**i for i, c in enumerate(scaled)),
        standard_errors=tuple(math.sqrt(variance * max(0.0, inverse[i][i])) / scale**i for i in range(size)),
        residual=math.sqrt(variance),
        num_points=len(points),
        num_dropped=num_dropped,
    )


def _invert(matrix: list[list[float]]) -> list[list[float]]:
    """Invert a matrix by Gauss-Jordan elimination. Matrices of normal equations are positive definite, so no pivoting
    is needed.
    """
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = [value / rows[column][column] for value in rows[column]]
        rows = [[v - row[column] * p for v, p in zip(row, pivot, strict=True)] for row in rows]
        rows[column] = pivot
    return [row[size:] for row in rows]
