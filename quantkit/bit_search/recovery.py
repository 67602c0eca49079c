"""Accuracy as the target of a search: tasks are asked of finished models only, in between KL stands for it.

Losses of accuracy are taken to shrink in proportion to KL. The first factor comes from a coarse model whose loss can be
seen, each further one from the model that missed the target.
"""

from dataclasses import dataclass, field

from quantkit.errors import DataError
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.run import evaluate
from quantkit.results import EvaluationResult, SearchResult
from quantkit.results.statistics.comparison import ALL_TASKS, compare_evaluations
from quantkit.runtime.llm import LLM

_SEEN = 0.5  # per cent: a loss below this is taken for it, since items are too few to show it
_STRICTER = (0.2, 0.7)  # how much of the KL remains after a miss, at least and at most
_LARGEST = 4.0  # times the KL of the coarse model, beyond which nothing is known


@dataclass(kw_only=True, slots=True)
class Judge:
    """The original's answers, and what of them other models keep.

    Args:
        original: loaded.
        goal: per cent of its scores.
    """

    original: LLM
    goal: float
    _answers: EvaluationResult | None = field(default=None)

    def recovery(self, llm: LLM) -> float:
        """Per cent of the original's scores, all tasks of the suite `quick` with equal weight.

        Raises:
            DataError: the tasks cannot be asked or compared.
        """
        asked = EvaluationOptions(suite="quick")
        if self._answers is None:
            self._answers = evaluate(self.original, asked)
        compared = compare_evaluations(evaluate(llm, asked), self._answers)
        overall = next((c.recovery for c in compared if c.subject == ALL_TASKS), None)
        if overall is None:
            raise DataError("the suite 'quick' has no task that gives a recovery here; search for --kl instead")
        return overall

    def first_kl(self, coarse: LLM, kl: float) -> float:
        """A KL that may do, learned from a coarse model and its KL."""
        lost = max(_SEEN, 100 - self.recovery(coarse))
        return kl * min(_LARGEST, (100 - self.goal) / lost)

    def next_kl(self, missed: SearchResult) -> float:
        """A stricter KL after a miss."""
        assert missed.recovery is not None
        share = (100 - self.goal) / max(_SEEN, 100 - missed.recovery)
        return missed.measured_kl * max(_STRICTER[0], min(_STRICTER[1], share))
