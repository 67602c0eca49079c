"""Which choice is fastest on this GPU: a search per kernel and shape that ends in a comparison with the default.

Of the candidates of a case those that do not compile, spill or compute something else are dropped. The rest is measured
in turns, a few samples first; the better half goes on with twice as many. The best few get their neighbours as rivals,
and the last one is measured in turns with the default: only if it is more than 2 % faster, by the median of the ratios
of neighbours in time, it replaces the default. Every finished case is written at once.
What runs and what a clock says are the business of a `Problem`, so that the search itself is tested without a GPU.
Source: Jamieson and Talwalkar 2016, successive halving.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch

from quantkit.errors import InputError
from quantkit.kernels.gpu import spaces, tuned
from quantkit.kernels.gpu.choices import Choice

LEAST_GAIN = 1.02
"""A choice replaces the default if it is more than so many times as fast."""

_FIRST_SAMPLES, _MOST_SAMPLES, _LAST_SAMPLES = 3, 24, 31
_REFINED = 2  # candidates whose neighbours are measured too
_HOPELESS = 1.5  # a candidate so many times slower than the best is not measured again


@dataclass(frozen=True, kw_only=True, slots=True)
class Case(tuned.Launch):
    """One kernel at one shape.

    Args:
        label: for people.
        default: what runs without a file.
        candidates: what else may run.
        work: what a `Problem` does.
    """

    label: str
    default: Choice
    candidates: tuple[Choice, ...]
    work: Any = None


class Problem(Protocol):
    """Something to run with a choice."""

    def check(self, choice: Choice) -> str:
        """Why the choice cannot be used: one or two words, the same for all such; empty if it can."""
        ...

    def times(self, choices: Sequence[Choice], samples: int) -> list[list[float]]:
        """Microseconds with each choice, measured in turns: as many samples for each."""
        ...


Open = Callable[[Case], AbstractContextManager[Problem]]
CaseReport = Callable[["Outcome | None", int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a case.

    Args:
        case: of which.
        entry: what is written; None if the default itself failed.
        num_tried: candidates looked at.
        dropped: how many were dropped, by reason.
        problem: why there is no entry.
    """

    case: Case
    entry: tuned.TunedChoice | None
    num_tried: int
    dropped: dict[str, int]
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """A run.

    Args:
        table: what its file holds now.
        outcomes: of the cases that this run finished.
        num_kept: cases that an earlier run had finished.
        num_left: cases for which there was no time.
        seconds: it took.
    """

    table: tuned.TunedTable
    outcomes: tuple[Outcome, ...]
    num_kept: int
    num_left: int
    seconds: float


class OutOfTime(Exception):
    """The time is over in the middle of a case."""


def search_choices(case: Case, problem: Problem, is_over: Callable[[], bool] = lambda: False) -> Outcome:
    """Find the choice for one case.

    Args:
        case: what to choose for.
        problem: runs it.
        is_over: asked before every longer step.
    Raises:
        OutOfTime: it was over before the case was decided.
    """
    tried: set[Choice] = {case.default}
    dropped: Counter[str] = Counter()

    def usable(choices: Iterable[Choice]) -> Iterator[Choice]:
        """Those that were not tried before and can be used."""
        for choice in choices:
            if choice in tried:
                continue
            # A check compiles a kernel, which may take seconds.
            if is_over():
                raise OutOfTime
            tried.add(choice)
            if wrong := problem.check(choice):
                dropped[wrong] += 1
            else:
                yield choice

    def halve(choices: list[Choice], keep: int) -> list[Choice]:
        """The best few."""
        samples = _FIRST_SAMPLES
        while len(choices) > keep:
            if is_over():
                raise OutOfTime
            times = [median(one) for one in problem.times(choices, samples)]
            order = sorted(range(len(choices)), key=times.__getitem__)
            order = [index for index in order if times[index] <= _HOPELESS * times[order[0]]]
            choices = [choices[index] for index in order[: max(keep, len(choices) // 2)]]
            # Few samples drop what is clearly slow; those that are left lie closer together and need more.
            samples = min(2 * samples, _MOST_SAMPLES)
        return choices

    if wrong := problem.check(case.default):
        return Outcome(case=case, entry=None, num_tried=0, dropped={}, problem=f"the default: {wrong}")
    best = halve([case.default, *usable(case.candidates)], _REFINED)
    rivals = usable(other for choice in best for other in spaces.refined(choice))
    winner = halve([*best, *rivals], 1)[0]
    entry = _compared_with_default(case, problem, winner)
    return Outcome(case=case, entry=entry, num_tried=len(tried) - 1, dropped=dict(dropped))


def _compared_with_default(case: Case, problem: Problem, winner: Choice) -> tuned.TunedChoice:
    """The winner if it beats the default, else the default."""
    before, *after = problem.times(list(dict.fromkeys([case.default, winner])), _LAST_SAMPLES)
    # Neighbours in time share the state of the clocks, so drift cancels in their ratio and not in two medians.
    ratio = median(old / new for old, new in zip(before, after[0], strict=True)) if after else 1.0
    is_better = ratio > LEAST_GAIN
    return tuned.TunedChoice(
        kernel=case.kernel,
        kind=case.kind,
        sizes=case.sizes,
        choice=winner if is_better else case.default,
        microseconds=median(after[0] if is_better else before),
        default_microseconds=median(before),
        ratio=ratio if is_better else 1.0,
    )


def tune(
    cases: Sequence[Case],
    open_problem: Open,
    fresh: tuned.TunedTable,
    *,
    seconds: float,
    again: bool = False,
    report: CaseReport = lambda outcome, number, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Search the choices for all cases and write them, one by one.

    Args:
        cases: the most important first.
        open_problem: prepares a case to be run, and frees its memory.
        fresh: an empty table of the GPU and of what measures, and the path of its file; what that holds stays.
        seconds: no case is begun, and none that is not decided is kept, after these.
        again: measure also what the file has; one that cannot be read is replaced.
        report: called with each case that is finished, or None for one that the file has, its number and how many.
        clock: in seconds.
    Raises:
        InputError: the file is there and cannot be used.
        OutputError: it cannot be written.
    """
    begun = clock()

    def is_over() -> bool:
        return clock() - begun >= seconds

    table = _table(fresh, again)
    known = set() if again else {entry.key for entry in table.entries}
    outcomes: list[Outcome] = []
    num_kept = num_left = 0
    for number, case in enumerate(cases, 1):
        if case.key in known:
            num_kept += 1
            report(None, number, len(cases))
            continue
        try:
            if is_over():
                raise OutOfTime
            with open_problem(case) as problem:
                outcome = search_choices(case, problem, is_over)
        except OutOfTime:
            # No break: further cases may be in the file already, and count as kept.
            num_left += 1
            continue
        except torch.OutOfMemoryError:
            reason = "does not fit the device's memory"
            outcome = Outcome(case=case, entry=None, num_tried=0, dropped={}, problem=reason)
        outcomes.append(outcome)
        if outcome.entry is not None:
            table = replace(table, entries=tuned.merged(table.entries, [outcome.entry]))
            tuned.write(table.path, table)
        report(outcome, number, len(cases))
    taken = clock() - begun
    return Tuning(table=table, outcomes=tuple(outcomes), num_kept=num_kept, num_left=num_left, seconds=taken)


def _table(fresh: tuned.TunedTable, again: bool) -> tuned.TunedTable:
    """What the file holds; nothing where there is none, or where a new beginning is wanted."""
    try:
        table = tuned.read(fresh.path, fresh.device) if fresh.path.exists() else fresh
    except InputError:
        if again:
            return fresh
        raise
    if dict(table.versions) == dict(fresh.versions):
        return table
    if again:
        return fresh
    then, now = (", ".join(f"{name} {of[name]}" for name in sorted(of)) for of in (table.versions, fresh.versions))
    raise InputError(
        f"{fresh.path}: was measured with {then}, this is {now}; begin anew with --again, or give another --output"
    )
