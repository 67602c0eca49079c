"""Sizes of the KV pool: as asked, as the memory allows, or a line that says what would do."""

from __future__ import annotations

import pytest
import torch

from quantkit.devices import pick_device
from quantkit.errors import InputError, RequestError
from quantkit.kernels.layouts import kv_scheme, make_layout, page_bytes, tail_bytes
from quantkit.runtime.cache import sizing as context
from quantkit.runtime.cache.sizing import check_settings, parse_bytes, size_pool


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 * 2**30),
        ("512 MB", 512_000_000),
        ("1.5g", 1_500_000_000),
        ("2ki", 2048),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "4 XiB", "4GiB more", True, 0, "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="give bytes, or a size such as"):
        parse_bytes(text)


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="unknown device 'tpu'"):
        pick_device("tpu")
    with pytest.raises(InputError, match="device 'cuda:99' is not there"):
        pick_device("cuda:99")


def layouts(kind="auto"):
    return [
        make_layout(num_heads=2, head_dim=8, page_size=16, dtype=torch.float32, scheme=kv_scheme(kind))
        for _ in range(3)
    ]


def pool(kind="auto", **changes):
    settings = {
        "page_size": 16, "max_sequences": 4, "max_length": 100, "asked_length": None, "num_pages": None,
        "memory": None, "device": torch.device("cpu"),
    }  # fmt: skip
    return size_pool(layouts(kind), **{**settings, **changes})


def test_enough_for_everybody_unless_told_otherwise():
    assert pool() == 4 * 7
    assert pool(num_pages=5) == 5


def test_free_memory_is_a_limit(monkeypatch):
    monkeypatch.setattr(context, "free_bytes", lambda device: 20 * page_bytes(layouts()))
    assert pool() == 10
    assert pool(max_sequences=1) == 7


@pytest.mark.parametrize("kind", ["auto", "int8", "int4"])
def test_a_budget_buys_what_fits_beside_the_tails(kind):
    made = layouts(kind)
    budget = 9 * page_bytes(made) + tail_bytes(made, 4)
    assert pool(kind, memory=budget) == 9
    assert pool(kind, memory=budget - 1) == 8


def test_too_small_for_one_sequence_says_what_it_takes():
    budget = 3 * page_bytes(layouts())
    assert pool(memory=budget) == 3
    with pytest.raises(
        RequestError, match=r"too small for one sequence of 100 tokens, which needs 42\.0 KiB"
    ) as caught:
        pool(memory=budget, asked_length=100)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="too small for one page"):
        pool(memory=10)


def test_a_model_with_its_own_cache_only_counts():
    made = size_pool(
        [], page_size=16, max_sequences=4, max_length=100, asked_length=None, num_pages=None, memory=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert made == 28


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_length": 0}, "max_length is 0"),
        ({"num_pages": -1}, "num_pages is -1"),
        ({"page_size": 1.5}, "page_size is 1.5"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"token_budget": 3}, "token_budget is 3 for 4 sequences"),
        ({"max_length": 100, "num_pages": 6}, "6 pages of 16 tokens hold 96.*use 7 pages or more"),
    ],
)
def test_contradictions_are_found_before_loading(settings, said):
    fine = {"max_length": None, "num_pages": None, "page_size": 16, "max_sequences": 4, "token_budget": 64}
    with pytest.raises(RequestError, match=said):
        check_settings(**{**fine, **settings})
