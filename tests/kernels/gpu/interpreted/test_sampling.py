"""The draw in Triton's interpreter against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit.kernels import gpu
from quantkit.kernels.ops import sampling
from quantkit.kernels.reference.sampling import Draw
from tests.helpers import one_of_each

ROWS = 5
SETTINGS = {
    "temperature": {"temperature": 0.8},
    "cold": {"temperature": 1e-38},
    "hot": {"temperature": 30.0, "top_p": 0.5},
    "one": {"top_k": 1},
    "few": {"top_k": 7},
    "some": {"top_k": 300, "temperature": 1.5},
    "more than there are": {"top_k": 100_000},
    "top-p": {"top_p": 0.9},
    "little top-p": {"top_p": 0.02, "temperature": 2.0},
    "min-p": {"min_p": 0.2},
    "only the likeliest": {"min_p": 1.0},
    "both": {"top_k": 20, "top_p": 0.8},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "temperature": 0.7},
}


def draw(number, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    return Draw(sampling_key(number), temperature, top_k, top_p, min_p)


def sampling_key(number):
    return (number * 0x5851F42D4C957F2D + 99) % 2**63 * (-1 if number % 2 else 1)


def both(logits, draws):
    return sampling._choose_on_gpu(logits, draws).tolist(), sampling.choose(logits, draws).tolist()


@pytest.mark.parametrize(("name", "size"), one_of_each(SETTINGS, (3001, 50)))
def test_draws_are_the_references(name, size):
    torch.manual_seed(size)
    logits = 2.5 * torch.randn(ROWS, size)
    actual, expected = both(logits, [draw(number, **SETTINGS[name]) for number in range(ROWS)])
    assert actual == expected
    if size > 50 and name not in ("cold", "one", "only the likeliest"):
        assert actual != logits.argmax(-1).tolist()


def test_rows_of_all_kinds_together():
    torch.manual_seed(1)
    draws = [None, *(draw(index, **SETTINGS[kind]) for index, kind in enumerate(("hot", "few", "min-p"))), None]
    logits = 3 * torch.randn(len(draws), 1500)
    actual, expected = both(logits, draws)
    assert actual == expected
    assert [actual[0], actual[-1]] == logits[[0, -1]].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["one", "few", "top-p", "only the likeliest", "all"])
def test_ties(name):
    """Few different values, many times each: who ties with the last one kept is kept."""
    torch.manual_seed(2)
    logits = torch.randint(-3, 4, (3, 1300)).float()
    logits[1:] = 0
    logits[2, 7::3] = -0.0
    actual, expected = both(logits, [draw(number, **SETTINGS[name]) for number in range(3)])
    assert actual == expected
    assert actual[1] != actual[2]


INFINITE = {
    "excluded": lambda row: row.masked_fill_(torch.rand(row.shape) < 0.9, -torch.inf),
    "one left": lambda row: row.fill_(-torch.inf).index_fill_(0, torch.tensor(1044), -5.0),
    "endless": lambda row: row.index_fill_(0, torch.tensor([3, 1200]), torch.inf),
    "not a number": lambda row: row.index_fill_(0, torch.tensor(1111), torch.nan),
    "huge": lambda row: row.mul_(1e37),
}


@pytest.mark.parametrize(("name", "kind"), list(itertools.product(INFINITE, ("temperature", "top-p", "all"))))
def test_infinities_and_nan(name, kind):
    torch.manual_seed(3)
    logits = torch.randn(2, 1300)
    for row in logits:
        INFINITE[name](row)
    actual, expected = both(logits, [draw(number, **SETTINGS[kind]) for number in range(2)])
    assert actual == expected


def test_nothing_left_is_the_first_token_and_no_rows_are_none():
    assert sampling._choose_on_gpu(torch.full((1, 1300), -torch.inf), [draw(1, top_p=0.5)]).tolist() == [0]
    assert sampling._choose_on_gpu(torch.empty(0, 1300), []).shape == (0,)


def test_greedy_takes_the_first_of_equals():
    logits = torch.zeros(2, 2500)
    logits[0, [1700, 2100]], logits[1, [1030, 5]] = 1.0, 1.0
    assert both(logits, [None, draw(0, top_k=1, temperature=1e-38)])[0][0] == 1700
    assert both(logits, [None, None])[0] == [1700, 5]


def test_rows_of_a_larger_tensor_and_which_version_is_used(monkeypatch):
    torch.manual_seed(4)
    logits = torch.randn(4, 3000)[:, 500:1700]
    draws = [draw(number, top_p=0.8) for number in range(4)]
    actual, expected = both(logits, draws)
    assert actual == expected
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    assert sampling.choose(logits, draws).tolist() == expected
