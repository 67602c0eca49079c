"""Choose one option per group to minimise total sensitivity within a budget, exactly.

This is the multiple-choice knapsack problem. Lagrangian relaxation gives a price per unit of cost, a first choice and a
bound on all other choices. Dynamic programming then searches all states that the bound does not rule out.
Sources: Nemhauser and Ullmann 1969, Discrete dynamic programming and capital allocation; Shoham and Gersho 1988,
Efficient bit allocation for an arbitrary set of quantizers.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

Choice = tuple[int, ...]
_ROUNDING = 1e-12  # relative to a total: sums of the same numbers in another order differ by this much


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to store a group.

    Args:
        cost: size of the group, e.g. in bytes.
        sensitivity: effect on the model, e.g. KL; may be negative.
    """

    cost: float
    sensitivity: float


Options = Sequence[Sequence[Option]]


def least_sensitivity(groups: Options, budget: float) -> Choice | None:
    """Return the choice with the least total sensitivity within the budget.

    Args:
        groups: options of each group, at least one.
        budget: maximum total cost.
    Returns:
        The index of the chosen option of each group; None if even the cheapest options exceed the budget.
    """
    return _solve([[(o.cost, o.sensitivity) for o in options] for options in groups], budget)


def least_cost(groups: Options, sensitivity: float) -> Choice | None:
    """Return the cheapest choice with at most this total sensitivity.

    Args:
        groups: options of each group, at least one.
        sensitivity: maximum total sensitivity.
    Returns:
        The index of the chosen option of each group; None if no choice has so little sensitivity.
    """
    return _solve([[(o.sensitivity, o.cost) for o in options] for options in groups], sensitivity)


def total(groups: Options, choice: Choice) -> Option:
    """Return the total cost and the total sensitivity of a choice."""
    chosen = [options[number] for options, number in zip(groups, choice, strict=True)]
    return Option(cost=math.fsum(o.cost for o in chosen), sensitivity=math.fsum(o.sensitivity for o in chosen))


Points = list[tuple[float, float, int]]  # weight, value and index of an option


def _solve(groups: Sequence[Sequence[tuple[float, float]]], limit: float) -> Choice | None:
    """Choose one (weight, value) per group with the least sum of values and a sum of weights within the limit."""
    points = [_undominated(options) for options in groups]
    # Rounding of the sum must not exclude a choice that meets the limit exactly.
    slack = _ROUNDING * max(abs(limit), math.fsum(max(abs(w) for w, _, _ in group) for group in points))
    limit += slack
    if math.fsum(group[0][0] for group in points) > limit:
        return None
    price, relaxed = _relax(points, limit)
    return _search(points, limit, price, _filled(points, relaxed, limit))


def _undominated(options: Sequence[tuple[float, float]]) -> Points:
    """Return the options that no other option beats in both weight and value, lightest first."""
    kept: Points = []
    for weight, value, number in sorted((w, v, n) for n, (w, v) in enumerate(options)):
        if not kept or value < kept[-1][1]:
            kept.append((weight, value, number))
    return kept


def _cheapest_at(group: Points, price: float) -> int:
    """Return the position of the option with the least value + price * weight; on ties, of the lightest such option."""
    return min(range(len(group)), key=lambda at: (group[at][1] + price * group[at][0], group[at][0]))


def _relax(points: Sequence[Points], limit: float) -> tuple[float, list[int]]:
    """Return the lowest price per unit of weight at which the best options of all groups (least value + price * weight)
    together stay within the limit, and the positions of these options.
    """
    # A group's best option changes only at the slope between two of its options: no other price matters.
    slopes = {0.0}
    for group in points:
        for at, (weight, value, _) in enumerate(group):
            slopes |= {(v - value) / (weight - w) for w, v, _ in group[:at]}
    prices = sorted(slopes)
    prices.append(2 * prices[-1] + 1)  # at this price every group takes its lightest option, however ties were rounded

    def fits(price: float) -> bool:
        return math.fsum(group[_cheapest_at(group, price)][0] for group in points) <= limit

    # The weight taken falls as the price rises, so the first price that fits is found by bisection.
    price = prices[min(bisect.bisect_left(prices, True, key=fits), len(prices) - 1)]
    return price, [_cheapest_at(group, price) for group in points]


def _filled(points: Sequence[Points], start: list[int], limit: float) -> list[int]:
    """Improve the relaxed choice within the limit: repeatedly make the exchange that lowers the value most."""
    chosen = list(start)
    left = limit - math.fsum(group[at][0] for group, at in zip(points, chosen, strict=True))
    while True:
        gains = [
            (group[chosen[n]][1] - group[at][1], n, at)
            for n, group in enumerate(points)
            for at in range(chosen[n] + 1, len(group))
            if group[at][0] - group[chosen[n]][0] <= left
        ]
        if not gains:
            return chosen
        _, n, at = max(gains)
        left -= points[n][at][0] - points[n][chosen[n]][0]
        chosen[n] = at


@dataclass(slots=True)
class _State:
    """A choice for the first groups: its weight, its value, its last option and the state before that option."""

    weight: float
    value: float
    number: int
    before: "_State | None"


def _search(points: Sequence[Points], limit: float, price: float, start: list[int]) -> Choice:
    """Return the best choice: extend all states that can still beat `start`, group by group."""
    best = math.fsum(group[at][1] for group, at in zip(points, start, strict=True))
    rest = [0.0] * (len(points) + 1)  # lower bound of value + price * weight of the groups from here on
    light = [0.0] * (len(points) + 1)  # lower bound of the weight of these groups
    for n in reversed(range(len(points))):
        rest[n] = rest[n + 1] + min(value + price * weight for weight, value, _ in points[n])
        light[n] = light[n + 1] + points[n][0][0]
    # A choice must beat the start by more than rounding, or the start is kept.
    ceiling = best - _ROUNDING * abs(best)
    states = [_State(0.0, 0.0, -1, None)]
    for n, group in enumerate(points):
        # Lagrangian bound: no completion adds less than rest - price * (weight left); drop states that cannot win.
        grown = [
            _State(state.weight + weight, state.value + value, number, state)
            for state in states
            for weight, value, number in group
            if state.weight + weight + light[n + 1] <= limit
            and state.value + value + rest[n + 1] - price * (limit - state.weight - weight) < ceiling
        ]
        # A heavier state is worth keeping only if its value is lower.
        grown.sort(key=lambda state: (state.weight, state.value))
        states = []
        for state in grown:
            if not states or state.value < states[-1].value:
                states.append(state)
    if not states:
        return tuple(group[at][2] for group, at in zip(points, start, strict=True))
    numbers: list[int] = []
    # States are kept in order of falling value.
    last: _State | None = states[-1]
    while last is not None and last.before is not None:
        numbers.append(last.number)
        last = last.before
    return tuple(reversed(numbers))
