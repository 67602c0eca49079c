"""Choose an option for each fused group: solve as if sensitivities were additive, then correct for interaction.

Sensitivities are measured one group at a time, but quantizing one group changes the effect of another. So the search
measures the chosen combination, and how the KL changes if one group moves to its next better or cheaper option. It
solves again with these changes as sensitivities, and repeats this as long as the measured KL falls.

If the target is task accuracy, the search uses KL as a proxy, since the accuracy of a choice can be measured only after
a model has been compressed with that choice. It assumes that the loss of accuracy is proportional to KL. The first
estimate of the ratio of loss to KL comes from a coarsely quantized model (the candidate with the largest KL below 0.2,
used for all groups), whose loss is large enough to measure. Later estimates come from models that missed the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantkit.bit_search.solve import Choice, Option, least_cost, least_sensitivity, total
from quantkit.errors import DataError, GateFailure
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.run import evaluate
from quantkit.results import EvaluationResult, SearchResult
from quantkit.results.statistics.comparison import ALL_TASKS, compare_evaluations
from quantkit.runtime.llm import LLM

if TYPE_CHECKING:
    from quantkit.bit_search.sensitivities import MeasuredGroups

_ROUNDS = 3  # maximum number of rounds; a round tries to move every group, in about two measurements per group
_PAIRS = 6  # maximum number of single moves and pairs to measure if making all moves together does not help
_TRIES = 5  # attempts to reach a KL; each attempt scales the limit of the summed KL by target / measured KL


Progress = Callable[[str], None]


def within_budget(
    groups: MeasuredGroups, budget: float, *, rounds: int = _ROUNDS, progress: Progress = lambda _: None
) -> Choice:
    """Find the choice with the smallest KL within a budget.

    Args:
        groups: the measured groups.
        budget: maximum bytes of all groups together.
        rounds: maximum number of rounds; each round tries the neighbouring options of every group.
        progress: called with one line per event.
    Raises:
        GateFailure: even the cheapest options exceed the budget.
    """
    options = groups.options
    choice = least_sensitivity(options, budget)
    if choice is None:
        least = sum(min(o.cost for o in group) for group in options)
        raise GateFailure(
            f"the smallest choice takes {least:.0f} bytes, {least / budget:.2f} times the budget; "
            "raise the target, or give smaller --candidates"
        )
    best = groups.kl(choice)
    for number in range(rounds):
        progress(f"refining, round {number + 1}: KL {best:.6f} with all groups together")
        better = next((c for c in _moves(groups, choice, best, budget) if groups.kl(c) < best), None)
        if better is None:
            break
        choice, best = better, groups.kl(better)
    return choice


def within_kl(groups: MeasuredGroups, kl: float, *, progress: Progress = lambda _: None) -> Choice:
    """Find the cheapest choice whose KL, measured with all groups quantized together, is at most `kl`.

    Args:
        groups: the measured groups.
        kl: maximum KL.
        progress: called with one line per event.
    Raises:
        GateFailure: the search found no choice with so small a KL.
    """
    options, limit, best = groups.options, kl, None
    for _ in range(_TRIES):
        choice = least_cost(options, limit)
        if choice is None:
            break
        measured = groups.kl(choice)
        progress(f"{total(options, choice).cost:.0f} bytes: KL {measured:.6f} with all groups together")
        if measured <= kl and (best is None or total(options, choice).cost < total(options, best).cost):
            best = choice
        if measured <= 0 or 0.97 * kl <= measured <= kl:
            break  # the KL that is left is rarely enough for a cheaper option of any group
        # Single-group KLs do not add up to the measured KL: scale the limit of their sum by target / measured KL.
        # 0.99 aims slightly below the target, since a choice above it does not count.
        limit *= 0.99 * kl / measured
    if best is None:
        raise GateFailure(f"no choice reaches a KL of {kl:g}; raise the target, or give --candidates with more bits")
    return best


def next_options(group: Sequence[Option], at: int) -> tuple[int, ...]:
    """Return the indices of the current option, of the best cheaper option, and of the cheapest better option.

    An option is better if it has less sensitivity. An index is left out if there is no such option.

    Args:
        group: options of one group.
        at: index of the current option.
    """
    here = group[at]
    cheaper = [n for n, option in enumerate(group) if option.cost < here.cost]
    dearer = [n for n, option in enumerate(group) if option.cost > here.cost and option.sensitivity < here.sensitivity]
    down = [min(cheaper, key=lambda n: (group[n].sensitivity, -group[n].cost))] if cheaper else []
    up = [min(dearer, key=lambda n: group[n].cost)] if dearer else []
    return (at, *down, *up)


def _moves(groups: MeasuredGroups, choice: Choice, best: float, budget: float) -> Iterator[Choice]:
    """Yield choices that may improve on `choice`: first the choice after all moves that pay off together, then the
    choices after the best single moves and pairs of moves.
    """
    options = groups.options
    rows = [next_options(group, at) for group, at in zip(options, choice, strict=True)]
    near = _neighbours(groups, choice, best)
    together = least_sensitivity(near, budget)
    assert together is not None  # the current choice is within the budget
    if any(together):
        yield tuple(row[n] for row, n in zip(rows, together, strict=True))
    # Many moves together may interact, so single moves and pairs are tried too.
    single = [(position, n) for position, row in enumerate(rows) for n in range(1, len(row))]
    left = budget - total(options, choice).cost
    paying = []
    for moves in (*((one,) for one in single), *itertools.combinations(single, 2)):
        if len({position for position, _ in moves}) < len(moves):
            continue
        cost = sum(near[position][n].cost - near[position][0].cost for position, n in moves)
        gain = sum(near[position][n].sensitivity for position, n in moves)
        if cost <= left and gain < 0:
            paying.append((gain, moves))
    for _, moves in sorted(paying)[:_PAIRS]:
        moved = dict(moves)
        yield tuple(row[moved.get(position, 0)] for position, row in enumerate(rows))


def _neighbours(groups: MeasuredGroups, choice: Choice, best: float) -> list[list[Option]]:
    """Return the options that `next_options` selects for each group, with new sensitivities.

    The new sensitivity of an option is the change of the KL when this group moves to the option and all other groups
    keep their current options.
    """

    def beside(number: int, at: int) -> Option:
        moved = (*choice[:number], at, *choice[number + 1 :])
        change = 0.0 if at == choice[number] else groups.kl(moved) - best
        return replace(groups.options[number][at], sensitivity=change)

    return [
        [beside(number, at) for at in next_options(group, choice[number])]
        for number, group in enumerate(groups.options)
    ]


_SEEN = 0.5  # per cent: smaller losses count as this much, since the tasks have too few items to show them
_STRICTER = (0.2, 0.7)  # smallest and largest factor by which the KL to try shrinks after a miss
_LARGEST = 4.0  # the search does not extrapolate beyond this multiple of the coarse model's KL


@dataclass(kw_only=True, slots=True)
class Judge:
    """Measures the task scores of compressed models relative to the original model.

    Args:
        original: the loaded original model.
        goal: target in per cent of the original's scores.
    """

    original: LLM
    goal: float
    _answers: EvaluationResult | None = field(default=None)

    def recovery(self, llm: LLM) -> float:
        """Return the recovery in per cent, averaged over the tasks of the suite `quick` with equal weights.

        Raises:
            DataError: the tasks cannot be run or compared.
        """
        asked = EvaluationOptions(suite="quick")
        if self._answers is None:
            self._answers = evaluate(self.original, asked)
        compared = compare_evaluations(evaluate(llm, asked), self._answers)
        overall = next((c.recovery for c in compared if c.subject == ALL_TASKS), None)
        if overall is None:
            raise DataError("no task of the suite 'quick' gives a recovery for this model; use --kl as the target")
        return overall

    def first_kl(self, coarse: LLM, kl: float) -> float:
        """Estimate the KL at which the goal is met, from a coarsely quantized model and its KL."""
        lost = max(_SEEN, 100 - self.recovery(coarse))
        return kl * min(_LARGEST, (100 - self.goal) / lost)

    def next_kl(self, missed: SearchResult) -> float:
        """Return a smaller KL to try after a model missed the goal."""
        assert missed.recovery is not None
        share = (100 - self.goal) / max(_SEEN, 100 - missed.recovery)
        return missed.measured_kl * max(_STRICTER[0], min(_STRICTER[1], share))
