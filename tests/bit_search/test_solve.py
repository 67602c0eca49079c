"""The solver against trying everything, on small random instances; bounds, ties and sizes of real models."""

from __future__ import annotations

import itertools
import random

import pytest

from quantkit.bit_search.solve import Option, least_cost, least_sensitivity, total


def instance(seed, *, ties=False, increasing=False):
    """Four to six groups of two to five options; small whole numbers give many ties."""
    draw = random.Random(seed)
    groups = []
    for _ in range(draw.randint(4, 6)):
        count = draw.randint(2, 5)
        costs = [draw.randint(1, 9) if ties else draw.uniform(1, 100) for _ in range(count)]
        sensitivities = [draw.randint(0, 9) if ties else draw.lognormvariate(0, 2) for _ in range(count)]
        if increasing:
            costs, sensitivities = sorted(costs), sorted(sensitivities, reverse=True)
        groups.append([Option(cost=c, sensitivity=d) for c, d in zip(costs, sensitivities, strict=True)])
    return groups


def everything(groups):
    return [total(groups, choice) for choice in itertools.product(*(range(len(options)) for options in groups))]


@pytest.mark.parametrize("seed", range(60))
def test_no_other_choice_within_the_budget_is_better(seed):
    groups = instance(seed, ties=seed % 3 == 0, increasing=seed % 2 == 0)
    totals = everything(groups)
    low, high = min(o.cost for o in totals), max(o.cost for o in totals)
    for share in (0.0, 0.1, 0.35, 0.6, 0.95, 1.2):
        budget = low + share * (high - low)
        choice = least_sensitivity(groups, budget)
        best = min(o.sensitivity for o in totals if o.cost <= budget * (1 + 1e-12))
        assert total(groups, choice).sensitivity == pytest.approx(best, rel=1e-9)
        assert total(groups, choice).cost <= budget * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_no_cheaper_choice_has_as_little_sensitivity(seed):
    groups = instance(seed, ties=seed % 3 == 0)
    totals = everything(groups)
    for limit in sorted(o.sensitivity for o in totals)[:: max(1, len(totals) // 5)]:
        choice = least_cost(groups, limit)
        assert total(groups, choice).cost == pytest.approx(min(o.cost for o in totals if o.sensitivity <= limit + 1e-9))


def test_a_budget_below_the_cheapest_is_none_and_one_at_it_is_met():
    groups = instance(3)
    cheapest = sum(min(o.cost for o in options) for options in groups)
    assert least_sensitivity(groups, cheapest * 0.999) is None
    assert total(groups, least_sensitivity(groups, cheapest)).cost == pytest.approx(cheapest)
    assert least_cost(groups, -1.0) is None


def test_sensitivity_may_be_negative_and_a_better_option_may_cost_less():
    groups = [[Option(cost=5, sensitivity=1.0), Option(cost=3, sensitivity=-0.5)], [Option(cost=1, sensitivity=0.0)]]
    assert least_sensitivity(groups, 100) == (1, 0)
    assert least_cost(groups, -0.5) == (1, 0)


def test_a_model_of_eighty_layers_is_solved_exactly_enough_to_use_up_its_budget():
    draw = random.Random(0)
    sizes = (6144 * 4096, 4096 * 4096, 28672 * 4096, 14336 * 4096)
    bits = (2.125, 3.125, 4.125, 4.5, 5.125, 6.125, 8.125, 16.0)
    groups = []
    for _ in range(80):
        for size in sizes:
            harm = draw.lognormvariate(-9, 1.5)
            groups.append(
                [Option(cost=size * b / 8, sensitivity=harm * 4.0 ** -(b - 4) * draw.uniform(0.7, 1.4)) for b in bits]
            )
    budget = 4.5 / 8 * 80 * sum(sizes)
    choice = least_sensitivity(groups, budget)
    assert budget - 28672 * 4096 / 8 < total(groups, choice).cost <= budget
    uniform = total(groups, (3,) * len(groups))
    assert total(groups, choice).sensitivity < uniform.sensitivity / 1.5
