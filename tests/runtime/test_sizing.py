"""Sizes of the KV pool: as asked, as the memory allows, or a line that says what would do."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import RequestError
from quantkit.kernels.layouts import KVLayout, kv_scheme, page_bytes, residual_bytes
from quantkit.numerics.kv_cache import LayerCache
from quantkit.runtime.cache import sizing
from quantkit.runtime.cache.sizing import size_pool
from quantkit.runtime.config import EngineConfig


def layouts(kind="auto"):
    return [
        KVLayout(num_heads=2, head_dim=8, page_size=16, dtype=torch.float32, cache=LayerCache(scheme=kv_scheme(kind)))
        for _ in range(3)
    ]


def pool(kind="auto", **settings):
    config = EngineConfig(**{"page_size": 16, "max_sequences": 4, **settings})
    return size_pool(layouts(kind), config, 100, torch.device("cpu"))


def test_enough_for_everybody_unless_told_otherwise():
    assert pool() == 4 * 7
    assert pool(num_pages=5) == 5


def test_free_memory_is_a_limit(monkeypatch):
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 20 * page_bytes(layouts()))
    assert pool() == 10
    assert pool(max_sequences=1) == 7


@pytest.mark.parametrize("kind", ["auto", "int8", "int4"])
def test_a_budget_buys_what_fits_beside_the_residual_windows(kind):
    made = layouts(kind)
    budget = 9 * page_bytes(made) + residual_bytes(made, 4)
    assert pool(kind, memory=budget) == 9
    assert pool(kind, memory=budget - 1) == 8


def test_too_small_for_one_sequence_says_what_it_takes():
    budget = 3 * page_bytes(layouts())
    assert pool(memory=budget) == 3
    with pytest.raises(
        RequestError, match=r"too small for one sequence of 100 tokens, which needs 42\.0 KiB"
    ) as caught:
        pool(memory=budget, max_length=100)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="too small for one page"):
        pool(memory=10)


def test_a_model_with_its_own_cache_only_counts():
    config = EngineConfig(page_size=16, max_sequences=4, memory=1)
    assert size_pool([], config, 100, torch.device("cpu")) == 28
