"""Compare the scores of two models on the same items: the difference and its 95 % interval, a paired test, and the
ratio and its 95 % interval.

For right-or-wrong items, the intervals are score intervals, which keep their coverage even if few items differ: Tango's
for the difference, and Nam and Blackwelder's for the ratio. The test is the mid-p form of McNemar's exact test. For
other scores, interval and test are Student's t on the per-item differences. The mean over several tasks gives all tasks
equal weight and adds the variances of the tasks.

If fewer than about three items are expected to differ, no interval computed from the counts can have exactly 95 %
coverage. The coverage of these intervals is then larger, up to 100 %.

Sources: Tango 1998, Equivalence test and confidence interval for the difference in proportions for the paired-sample
design. Nam and Blackwelder 2002, Analysis of the ratio of marginal probabilities in a matched-pair setting. Fagerland,
Lydersen and Laake 2013, The McNemar test for binary matched-pairs data. Numerical Recipes, section 6.4, for the
continued fraction of the incomplete beta function. Distributions are in plain Python, so SciPy is not needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

NORMAL = NormalDist()


def bisect(function: Callable[[float], float], low: float, high: float, *, steps: int = 80) -> float:
    """Return the point where a decreasing function changes sign.

    Args:
        function: positive at `low`, negative at `high`. If the function does not change sign, the result is the end of
            the interval at which the function is nearer to zero.
        low, high: ends of the interval to search.
        steps: number of halvings; 80 reach the precision of a float.
    """
    for _ in range(steps):
        middle = (low + high) / 2
        # No float lies between `low` and `high`, so the middle is rounded to one of them.
        if not low < middle < high:
            break
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def binomial_pmf(successes: int, trials: int, chance: float = 0.5) -> float:
    """Return the probability of exactly `successes` successes in `trials` trials; 0 < chance < 1."""
    # In logarithms: factorials beyond 170 overflow a float.
    ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    return math.exp(ways + successes * math.log(chance) + (trials - successes) * math.log1p(-chance))


def binomial_cdf(successes: int, trials: int) -> float:
    """Return the probability of at most `successes` successes in `trials` trials with a chance of 0.5 each."""
    return min(1.0, math.fsum(binomial_pmf(k, trials) for k in range(successes + 1)))


def student_cdf(t: float, freedom: float) -> float:
    """Return the cumulative distribution of Student's t at `t`, with `freedom` degrees of freedom."""
    tail = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t > 0 else tail


@cache
def student_quantile(probability: float, freedom: float) -> float:
    """Return the inverse of `student_cdf`, or the normal quantile if `freedom` is infinite."""
    if math.isinf(freedom):
        return NORMAL.inv_cdf(probability)
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    high = 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    return bisect(lambda t: probability - student_cdf(t, freedom), 0.0, high)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )  # symmetric under (a, x) <-> (b, 1 - x)
    # The continued fraction converges fast only for such x; for larger x, use the symmetry.
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Evaluate the continued fraction of the incomplete beta function by Lentz's method."""
    # Lentz's method replaces a denominator of zero by a tiny number, which cancels one step later.
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


CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedResult:
    """Result of comparing two models on the same items.

    Args:
        method: names of interval and test.
        num_samples: number of pairs.
        baseline, value: score of the original and of the model: mean over items, then over tasks.
        difference, low, high: value - baseline and its 95 % interval.
        ratio, ratio_low, ratio_high: value / baseline and its 95 % interval; None if baseline is 0.
        p_value: two-sided p-value of the hypothesis that the models do not differ. The p-value and the ends of the
            intervals are None if no standard error is known.
    """

    method: str
    num_samples: int
    baseline: float
    value: float
    difference: float
    low: float | None = None
    high: float | None = None
    ratio: float | None
    ratio_low: float | None = None
    ratio_high: float | None = None
    p_value: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of right-or-wrong pairs: both right, only the original right (lost), only the model right (won), neither
    right.
    """

    both: int
    lost: int
    won: int
    neither: int

    @property
    def total(self) -> int:
        """Number of pairs."""
        return self.both + self.lost + self.won + self.neither

    @property
    def means(self) -> tuple[float, float]:
        """Return the shares of right answers, the original's first."""
        return (self.both + self.lost) / self.total, (self.both + self.won) / self.total

    def difference_variance(self, difference: float) -> float:
        """Return the variance of the mean difference of the scores, if the true difference is `difference`.

        The variance also depends on the share of lost items, which is estimated by maximum likelihood; the share of won
        items is this share plus `difference`.
        """
        n, won, lost = self.total, self.won, self.lost
        # The likeliest share q of lost items solves 2n q^2 + linear q + constant = 0; the share won is q + difference.
        linear = -won - lost + (2 * n - won + lost) * difference
        constant = -lost * difference * (1 - difference)
        share = (math.sqrt(max(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
        return max(0.0, 2 * share + difference * (1 - difference)) / n

    def ratio_variance(self, ratio: float) -> float:
        """Return the variance of value - ratio * baseline if the true ratio is `ratio`.

        Besides the ratio, the variance depends on how many items only the compressed model gets right (won). That share
        is estimated by maximum likelihood. Together with `ratio` and the share that neither model gets right, it gives
        the share that only the original gets right (lost).
        """
        n = self.total
        won, lost, neither = self.won / n, self.lost / n, self.neither / n
        before, after = self.means
        # The likeliest share of won items if the ratio of the means is fixed: a root of a quadratic equation.
        root = (after - ratio**2 * before) ** 2 + 4 * ratio**2 * won * lost
        top = -after + ratio**2 * (before + 2 * won) + math.sqrt(root)
        likely_won = top / (2 * ratio * (ratio + 1)) if ratio > 0 else 0.0
        likely_lost = ratio * likely_won - (ratio - 1) * (1 - neither)
        return max(0.0, ratio * (likely_won + likely_lost)) / n


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Means, variances and covariance of pairs of scores; variances and covariance are divided by total - 1.

    `signed` says whether any score is negative.
    """

    means: tuple[float, float]
    variances: tuple[float, float]
    covariance: float
    total: int
    signed: bool = False

    def difference_variance(self, _difference: float) -> float:
        """Return the variance of the mean difference of the scores, which does not depend on the true difference."""
        return self.ratio_variance(1.0)

    def ratio_variance(self, ratio: float) -> float:
        """Return the variance of value - ratio * baseline."""
        baseline, value = self.variances
        return max(0.0, value + ratio**2 * baseline - 2 * ratio * self.covariance) / self.total


Pairs = tuple[Sequence[float], Sequence[float]]


def compare_pairs(tasks: Sequence[Pairs]) -> PairedResult:
    """Compare the scores of two models in one task, or their unweighted mean over several tasks.

    Args:
        tasks: for each task, the original's scores and the model's scores, item by item; at least one item per task.
    Raises:
        ValueError: a task has no pairs, or its lists differ in length.
    """
    return compare_strata([_stratum(*pairs) for pairs in tasks])


def compare_strata(strata: Sequence[Counts | Moments]) -> PairedResult:
    """Compare two models as `compare_pairs` does, with each task given as counts or moments of its scores."""
    count = len(strata)
    baseline = math.fsum(s.means[0] for s in strata) / count
    value = math.fsum(s.means[1] for s in strata) / count
    # A normal quantile, as in score intervals, if all scores are right-or-wrong; otherwise a quantile of Student's t.
    critical = student_quantile(0.5 + CONFIDENCE / 2, _freedom(strata))

    def gap(difference: float) -> float:
        # Tasks share no items, so variances add: the mean's variance is their sum divided by the squared count.
        variance = math.fsum(s.difference_variance(difference) for s in strata) / count**2
        return _studentize(value - baseline - difference, variance)

    def ratio_gap(ratio: float) -> float:
        variance = math.fsum(s.ratio_variance(ratio) for s in strata) / count**2
        # Linear in the ratio, as in Fieller's interval: there is no division by a baseline that may be near zero.
        return _studentize(value - ratio * baseline, variance)

    low, high = _interval(gap, value - baseline, critical, *_difference_range(strata))
    ratio = value / baseline if baseline > 0 else None
    least = None if any(isinstance(s, Moments) and s.signed for s in strata) else 0.0
    ratio_low, ratio_high = (None, None) if ratio is None else _interval(ratio_gap, ratio, critical, least, None)
    return PairedResult(
        baseline=baseline,
        value=value,
        difference=value - baseline,
        low=low,
        high=high,
        p_value=_p_value(strata, gap(0.0)),
        ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        num_samples=sum(s.total for s in strata),
        method=_method(strata),
    )


def count_pairs(baseline: Sequence[float], value: Sequence[float]) -> Counts:
    """Count the items that both models, only the original, only the compressed model, or neither answers correctly."""
    pairs = [(before > 0.5, after > 0.5) for before, after in zip(baseline, value, strict=True)]
    return Counts(
        both=pairs.count((True, True)),
        lost=pairs.count((True, False)),
        won=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )


def mcnemar(lost: int, won: int) -> float:
    """Return the two-sided mid-p value of McNemar's exact test; 1 if nothing differs."""
    total, fewer = lost + won, min(lost, won)
    if total == 0:
        return 1.0
    return min(1.0, 2 * binomial_cdf(fewer, total) - binomial_pmf(fewer, total))


def _stratum(baseline: Sequence[float], value: Sequence[float]) -> Counts | Moments:
    if len(baseline) != len(value) or not baseline:
        raise ValueError(
            f"both models need the same number of scores, at least one; found {len(baseline)} and {len(value)}"
        )
    # The scores decide, not the metric's name: if all are 0 or 1, the score interval is used.
    if {*baseline, *value} <= {0.0, 1.0}:
        return count_pairs(baseline, value)
    total = len(baseline)
    free = max(1, total - 1)
    means = math.fsum(baseline) / total, math.fsum(value) / total
    around_b, around_v = ([x - mean for x in scores] for scores, mean in zip((baseline, value), means, strict=True))
    return Moments(
        means=means,
        variances=(math.fsum(x * x for x in around_b) / free, math.fsum(y * y for y in around_v) / free),
        covariance=math.fsum(x * y for x, y in zip(around_b, around_v, strict=True)) / free,
        total=total,
        signed=min(*baseline, *value) < 0,
    )


def _studentize(gap: float, variance: float) -> float:
    """Divide a difference by its standard error; infinite if the variance is 0 and the difference is not."""
    if variance > 0:
        return gap / math.sqrt(variance)
    # Equal means may differ in their last digit once they are averaged over tasks.
    return 0.0 if abs(gap) < 1e-12 else math.copysign(math.inf, gap)


def _interval(
    gap: Callable[[float], float], estimate: float, critical: float, low: float | None, high: float | None
) -> tuple[float, float]:
    """Return the interval of all true values that a test does not reject.

    `gap` is a decreasing function: the test statistic for a true value. A value is rejected if its statistic exceeds
    `critical` in magnitude. `low` and `high` limit the search; a limit that is None is found by doubling.
    """
    if low is None:
        low = estimate - 1
        while gap(low) < critical and low > -1e6:
            low -= estimate - low
    if high is None:
        high = 2 * max(estimate, 1e-9)
        # With a baseline near zero the ratio may have no upper bound, so the search stops at a fixed value.
        while gap(high) > -critical and high < 1e6:
            high *= 2
    lower = bisect(lambda x: gap(x) - critical, low, estimate) if estimate > low else low
    upper = bisect(lambda x: gap(x) + critical, estimate, high) if estimate < high else high
    return lower, upper


def _difference_range(strata: Sequence[Counts | Moments]) -> tuple[float, float]:
    """Return the range in which to search for the ends of an interval of the difference: -1 to 1 for right-or-wrong
    items, and a very wide range for other scores.
    """
    if all(isinstance(s, Counts) for s in strata):
        return -1.0, 1.0
    centre = math.fsum(after - before for before, after in (s.means for s in strata)) / len(strata)
    reach = 1.0 + 1e3 * math.sqrt(math.fsum(s.difference_variance(0.0) for s in strata))
    return centre - reach, centre + reach


def _freedom(strata: Sequence[Counts | Moments]) -> float:
    """Return the degrees of freedom for Student's t.

    The result is one less than the number of items of the smallest task that has scores other than 0 and 1. It is
    infinite if no task has such scores.
    """
    # The smallest task has the least certain variance; an interval that is too wide is the safer mistake.
    return min((max(1, s.total - 1) for s in strata if isinstance(s, Moments)), default=math.inf)


def _p_value(strata: Sequence[Counts | Moments], gap: float) -> float:
    # The exact test is valid for small counts too. Its plain form rejects too seldom, so the mid-p form is used.
    if len(strata) == 1 and isinstance(strata[0], Counts):
        return mcnemar(strata[0].lost, strata[0].won)
    freedom = _freedom(strata)
    # All items have the same difference, which is not 0: impossible unless the models differ.
    if math.isinf(gap):
        return 0.0
    tail = NORMAL.cdf(-abs(gap)) if math.isinf(freedom) else student_cdf(-abs(gap), freedom)
    return min(1.0, 2 * tail)


def _method(strata: Sequence[Counts | Moments]) -> str:
    if len(strata) > 1:
        return f"mean of {len(strata)} tasks, variances added"
    if isinstance(strata[0], Counts):
        return "Tango score interval, McNemar mid-p test"
    return "Student's t on paired differences"
