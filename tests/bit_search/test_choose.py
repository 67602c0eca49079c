"""Choosing on models made of numbers: additive ones are solved, others are mended, what nothing meets is said."""

from __future__ import annotations

import itertools

import pytest

from quantkit.bit_search.choose import next_options, within_budget, within_kl
from quantkit.bit_search.options import SearchTarget
from quantkit.bit_search.solve import Option, total
from quantkit.errors import GateFailure, InputError


class Numbers:
    """Groups whose sensitivities add up, but for what pairs of them do to each other."""

    def __init__(self, harms, together=lambda choice: 0.0, factor=1.0):
        self.options = [
            tuple(Option(cost=bits, sensitivity=harm * 4.0**-bits) for bits in (2, 3, 4, 8)) for harm in harms
        ]
        self.asked = []
        self._together, self._factor = together, factor

    def kl(self, choice):
        self.asked.append(choice)
        return self._factor * total(self.options, choice).sensitivity + self._together(choice)


def best_of_all(groups, budget):
    choices = itertools.product(range(4), repeat=len(groups.options))
    return min(groups.kl(c) for c in choices if total(groups.options, c).cost <= budget)


def test_what_adds_up_is_solved_at_once():
    groups = Numbers([1.0, 30.0, 2.0, 500.0])
    choice = within_budget(groups, 16)
    assert groups.kl(choice) == best_of_all(groups, 16)
    assert total(groups.options, choice).cost <= 16


def test_what_two_groups_do_to_each_other_is_seen_by_moving_them():
    """Alone the first two look harmless at 2 bits; together they are not."""
    groups = Numbers([0.1, 0.1, 4.0, 4.0], lambda choice: 0.5 * (choice[0] == 0 and choice[1] == 0))
    added = within_budget(groups, 12, rounds=0)
    assert added[:2] == (0, 0)
    mended = within_budget(groups, 12)
    assert groups.kl(mended) < groups.kl(added)
    assert groups.kl(mended) == pytest.approx(best_of_all(groups, 12))


def test_refining_never_ends_worse_than_it_began():
    groups = Numbers([5.0, 3.0, 2.0, 9.0], lambda choice: 0.01 * (sum(choice) % 3))
    assert groups.kl(within_budget(groups, 15)) <= groups.kl(within_budget(groups, 15, rounds=0))


def test_steps_are_one_down_and_one_up():
    group = [Option(cost=c, sensitivity=d) for c, d in ((2, 9.0), (4, 5.0), (4.5, 6.0), (5, 3.0), (8, 1.0), (16, 0.0))]
    assert next_options(group, 3) == (3, 1, 4)
    assert next_options(group, 0) == (0, 1)
    assert next_options(group, 5) == (5, 4)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.8])
def test_a_kl_is_kept_whatever_the_parts_add_up_to(factor):
    groups = Numbers([1.0, 30.0, 2.0, 500.0], factor=factor)
    choice = within_kl(groups, 0.3)
    assert groups.kl(choice) <= 0.3
    every = itertools.product(range(4), repeat=4)
    cheapest = min(total(groups.options, c).cost for c in every if groups.kl(c) <= 0.3)
    assert total(groups.options, choice).cost <= cheapest + 1


def test_what_cannot_be_reached_says_so():
    groups = Numbers([1.0, 1.0])
    with pytest.raises(GateFailure, match=r"the smallest choice takes 4 bytes, 2\.00 times the budget"):
        within_budget(groups, 2)
    with pytest.raises(GateFailure, match="no choice reaches a KL of 1e-09"):
        within_kl(groups, 1e-9)


def test_one_target_is_asked_for():
    assert [SearchTarget(bits=4.5).text, SearchTarget(kl=0.02).text, SearchTarget(recovery=99).text] == [
        "bits<=4.5",
        "kl<=0.02",
        "recovery>=99",
    ]
    for wrong in ({}, {"bits": 4.0, "kl": 0.1}, {"bits": 0}, {"bits": float("nan")}):
        with pytest.raises(InputError, match="a target above zero"):
            SearchTarget(**wrong)
