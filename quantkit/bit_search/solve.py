"""The option of each group for the least sensitivity within a budget: exact, and nothing but numbers.

This is the multiple-choice knapsack problem. Lagrange's relaxation gives a price per unit of cost, a first choice and a
bound on what any other can reach; states that the bound rules out are dropped, and what is left is searched in full.
Sources: Nemhauser and Ullmann 1969, Discrete dynamic programming and capital allocation; Shoham and Gersho 1988,
Efficient bit allocation for an arbitrary set of quantizers.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

Choice = tuple[int, ...]
_ROUNDING = 1e-12  # of a total: sums of the same numbers in another order differ by this much


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to store a group.

    Args:
        cost: what it takes, e.g. bytes.
        sensitivity: what it does to the model, e.g. KL; may be negative.
    """

    cost: float
    sensitivity: float


Options = Sequence[Sequence[Option]]


def least_sensitivity(groups: Options, budget: float) -> Choice | None:
    """The choice with the least sensitivity that the budget allows.

    Args:
        groups: options of each group, at least one.
        budget: total cost at most.
    Returns:
        number of the chosen option of each group; None when the cheapest options are beyond the budget.
    """
    return _solve([[(o.cost, o.sensitivity) for o in options] for options in groups], budget)


def least_cost(groups: Options, sensitivity: float) -> Choice | None:
    """The cheapest choice with at most this sensitivity.

    Args:
        groups: options of each group, at least one.
        sensitivity: in total at most.
    Returns:
        as `least_sensitivity`; None when the least sensitivity possible is more.
    """
    return _solve([[(o.sensitivity, o.cost) for o in options] for options in groups], sensitivity)


def total(groups: Options, choice: Choice) -> Option:
    """Cost and sensitivity of a choice, summed."""
    chosen = [options[number] for options, number in zip(groups, choice, strict=True)]
    return Option(cost=math.fsum(o.cost for o in chosen), sensitivity=math.fsum(o.sensitivity for o in chosen))


Points = list[tuple[float, float, int]]  # weight, value and number of an option


def _solve(groups: Sequence[Sequence[tuple[float, float]]], limit: float) -> Choice | None:
    """Least sum of values with a sum of weights within the limit; one (weight, value) of each group."""
    points = [_undominated(options) for options in groups]
    # A choice that takes the limit exactly must not fail by the rounding of its sum.
    slack = _ROUNDING * max(abs(limit), math.fsum(max(abs(w) for w, _, _ in group) for group in points))
    limit += slack
    if math.fsum(group[0][0] for group in points) > limit:
        return None
    price, relaxed = _relax(points, limit)
    return _search(points, limit, price, _filled(points, relaxed, limit))


def _undominated(options: Sequence[tuple[float, float]]) -> Points:
    """Options of which no other is both lighter and better, the lightest first."""
    kept: Points = []
    for weight, value, number in sorted((w, v, n) for n, (w, v) in enumerate(options)):
        if not kept or value < kept[-1][1]:
            kept.append((weight, value, number))
    return kept


def _cheapest_at(group: Points, price: float) -> int:
    """Position of the least value plus price times weight; of equals the lightest."""
    return min(range(len(group)), key=lambda at: (group[at][1] + price * group[at][0], group[at][0]))


def _relax(points: Sequence[Points], limit: float) -> tuple[float, list[int]]:
    """The lowest price at which what each group takes by itself is within the limit, and what they take."""
    # What a group takes by itself changes only at the slope between two of its options: no other price matters.
    slopes = {0.0}
    for group in points:
        for at, (weight, value, _) in enumerate(group):
            slopes |= {(v - value) / (weight - w) for w, v, _ in group[:at]}
    prices = sorted(slopes)
    prices.append(2 * prices[-1] + 1)  # here everything takes its lightest, however ties above were rounded

    def fits(price: float) -> bool:
        return math.fsum(group[_cheapest_at(group, price)][0] for group in points) <= limit

    # The weight taken falls as the price rises, so the first price that fits is found by bisection.
    price = prices[min(bisect.bisect_left(prices, True, key=fits), len(prices) - 1)]
    return price, [_cheapest_at(group, price) for group in points]


def _filled(points: Sequence[Points], start: list[int], limit: float) -> list[int]:
    """Spend what the relaxation left over on the exchanges that help most."""
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
    """A choice for the first groups: its weight, its value, the last option and what came before."""

    weight: float
    value: float
    number: int
    before: "_State | None"


def _search(points: Sequence[Points], limit: float, price: float, start: list[int]) -> Choice:
    """Every state that may still lead to something better than `start`, group after group."""
    best = math.fsum(group[at][1] for group, at in zip(points, start, strict=True))
    rest = [0.0] * (len(points) + 1)  # of the groups from here on: value plus price times weight, at least
    light = [0.0] * (len(points) + 1)  # and their weight, at least
    for n in reversed(range(len(points))):
        rest[n] = rest[n + 1] + min(value + price * weight for weight, value, _ in points[n])
        light[n] = light[n + 1] + points[n][0][0]
    # Better than the start by more than rounding, or the start is kept.
    ceiling = best - _ROUNDING * abs(best)
    states = [_State(0.0, 0.0, -1, None)]
    for n, group in enumerate(points):
        # Lagrange: no completion adds less than rest - price * (weight left); states that cannot win go.
        grown = [
            _State(state.weight + weight, state.value + value, number, state)
            for state in states
            for weight, value, number in group
            if state.weight + weight + light[n + 1] <= limit
            and state.value + value + rest[n + 1] - price * (limit - state.weight - weight) < ceiling
        ]
        # Of two states the heavier one is worth keeping only if its value is lower.
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
