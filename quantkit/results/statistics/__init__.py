"""Statistics of comparisons and latencies, in plain Python: intervals that cover what they say, tests, fits."""

from quantkit.results.statistics.comparison import (
    ALL_TASKS,
    ANSWER_LENGTH,
    LENGTH_BAND,
    compare_evaluations,
    compare_lengths,
    compare_perplexity,
    compare_task,
)
from quantkit.results.statistics.paired import PairedResult, compare_pairs, mcnemar
from quantkit.results.statistics.summary import (
    PolynomialFit,
    Quantiles,
    fit_polynomial,
    median_interval,
    percentile,
    quantiles,
)

__all__ = [
    "ALL_TASKS",
    "ANSWER_LENGTH",
    "LENGTH_BAND",
    "PairedResult",
    "PolynomialFit",
    "Quantiles",
    "compare_evaluations",
    "compare_lengths",
    "compare_pairs",
    "compare_perplexity",
    "compare_task",
    "fit_polynomial",
    "mcnemar",
    "median_interval",
    "percentile",
    "quantiles",
]
