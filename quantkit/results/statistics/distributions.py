"""The few distributions that tests and intervals need, in plain Python: no SciPy, which users need not have.

Source: Numerical Recipes, section 6.4, for the continued fraction of the incomplete beta function.
"""

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist

NORMAL = NormalDist()


def bisect(function: Callable[[float], float], low: float, high: float, *, steps: int = 80) -> float:
    """Return the point where a falling function changes sign.

    Args:
        function: positive at `low`, negative at `high` (or of one sign: then the nearer end is returned).
        low, high: the bracket.
        steps: halvings; 80 exhaust a float.
    """
    for _ in range(steps):
        middle = (low + high) / 2
        # The bracket holds no further float: the middle is one of its ends.
        if not low < middle < high:
            break
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def binomial_pmf(successes: int, trials: int, chance: float = 0.5) -> float:
    """Probability of exactly that many successes, 0 < chance < 1."""
    # In logarithms: factorials beyond 170 overflow a float.
    ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    return math.exp(ways + successes * math.log(chance) + (trials - successes) * math.log1p(-chance))


def binomial_cdf(successes: int, trials: int, chance: float = 0.5) -> float:
    """Probability of at most that many successes."""
    return min(1.0, math.fsum(binomial_pmf(k, trials, chance) for k in range(successes + 1)))


def student_cdf(t: float, freedom: float) -> float:
    """Student's distribution at `t` with `freedom` degrees of freedom."""
    tail = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t > 0 else tail


@cache
def student_quantile(probability: float, freedom: float) -> float:
    """Inverse of `student_cdf`; the normal quantile when `freedom` is infinite."""
    if math.isinf(freedom):
        return NORMAL.inv_cdf(probability)
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    high = 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    return bisect(lambda t: probability - student_cdf(t, freedom), 0.0, high)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )  # symmetric under (a, x) <-> (b, 1 - x)
    # The fraction converges fast on this side only; the other side follows by symmetry.
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction."""
    # Lentz: a denominator of zero is replaced by something tiny, which cancels one step later.
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 300):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + step * d) or tiny)
            c = (1 + step / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
