"""How GPTQ's work is dealt out."""

from __future__ import annotations

import itertools
import random

import pytest

from quantkit.compress.algorithms._gptq_jobs import deal_out


def loads(work, owners, count):
    given = [
        [(of, cost, once) for (of, cost, once), owner in zip(work, owners, strict=True) if owner == n]
        for n in range(count)
    ]
    return [sum(cost for _, cost, _ in own) + sum({of: once for of, _, once in own}.values()) for own in given]


def test_the_widest_set_stays_whole_where_that_balances():
    work = [("down", 32, 22), ("down", 32, 22), ("qkv", 11, 1), ("gate", 24, 1), ("gate", 23, 1)]
    assert deal_out(work, 2) == [0, 0, 1, 1, 1]
    assert deal_out(work, 1) == [0] * 5
    assert deal_out([], 2) == []


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_other_shares_in_a_row_are_smaller(count):
    draw = random.Random(count)
    work = [(number // 2, draw.randint(1, 9), 4 + number // 4) for number in range(7)]
    rows = (owners for owners in itertools.product(range(count), repeat=7) if list(owners) == sorted(owners))
    best = min(max(loads(work, owners, count)) for owners in rows)
    assert max(loads(work, deal_out(work, count), count)) == pytest.approx(best)
