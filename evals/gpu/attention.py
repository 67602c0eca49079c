"""Paged attention of a decode step by KV type; and torch's.

It is bound by the bytes of keys and values, so the rows have the share of the copy bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from results import Results
from timing import dtype_on, measure, num_copies, open_results, parse

from quantkit.kernels.layouts import KVLayout, kv_scheme, page_bytes
from quantkit.kernels.types import AttentionOptions, ForwardBatch
from quantkit.numerics.kv_cache import LayerCache
from quantkit.runtime.cache.kv_cache import KVCache

KV_TYPES = {"quantkit bf16": "auto", "quantkit int8": "int8", "quantkit fp8": "fp8", "quantkit int4": "int4"}
SDPA = "torch sdpa bf16, contiguous"
PAGE = 64


@dataclass(frozen=True)
class Case:
    """What is attended to.

    Args:
        batch, context: B and C.
        heads, kv_heads, dim, page: of the model and the cache.
    """

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = PAGE

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in bf16."""
        return 4 * self.batch * self.context * self.kv_heads * self.dim


CASE = Case(batch=32, context=8192)
TINY = Case(batch=2, context=70, heads=4, kv_heads=2, dim=32, page=16)


def decode_batch(batch: int, context: int, device: str, page_size: int = PAGE) -> tuple[ForwardBatch, int]:
    """One new token for each of `batch` sequences of `context` tokens, pages in shuffled order; the number of pages."""
    pages, last = -(-context // page_size), context - 1
    table = torch.randperm(batch * pages).view(batch, pages)
    return ForwardBatch(
        token_ids=torch.randint(0, 1000, (batch,)).to(device),
        positions=torch.full((batch,), last).to(device),
        query_starts=torch.arange(batch + 1, dtype=torch.int32).to(device),
        page_table=table.to(device, torch.int32),
        slots=(table[:, last // page_size] * page_size + last % page_size).to(device),
        residual_rows=torch.arange(batch, device=device),
        logit_rows=torch.arange(batch).to(device),
        query_lengths=(1,) * batch,
        context_lengths=(context,) * batch,
        sequence_ids=tuple(range(batch)),
    ), batch * pages


def fill(cache: KVCache) -> None:
    """Random bytes that are small, ordinary numbers in every type."""
    for memory in (*cache._pools, *cache._residuals):
        memory.view(torch.uint8).random_(0, 0x3F)


def paged(kind: str, case: Case, device: str) -> dict[str, Any]:
    """Time of attention, store included, over caches that rotate."""
    dtype = dtype_on(device)
    sizes = {"num_heads": case.kv_heads, "head_dim": case.dim, "page_size": case.page}
    layout = KVLayout(**sizes, dtype=dtype, cache=LayerCache(scheme=kv_scheme(kind)))
    step, num_pages = decode_batch(case.batch, case.context, device, case.page)
    size = page_bytes([layout]) * num_pages
    caches = [KVCache([layout], num_pages, case.batch, device) for _ in range(num_copies(size, device))]
    for cache in caches:
        fill(cache)
    query = torch.randn(case.batch, case.heads, case.dim, device=device, dtype=dtype)
    key, value = (torch.randn(case.batch, case.kv_heads, case.dim, device=device, dtype=dtype) for _ in range(2))
    options = AttentionOptions(scale=case.dim**-0.5)
    timing = measure(
        [lambda cache=cache: cache.attention[0]((query, key, value), step, options) for cache in caches], device
    )
    return {**timing, "bytes": size}


def sdpa(case: Case, device: str) -> dict[str, Any]:
    """Time of torch's scaled_dot_product_attention over contiguous keys and values that rotate."""
    dtype = dtype_on(device)
    query = torch.randn(case.batch, case.heads, 1, case.dim, device=device, dtype=dtype)
    shape = (case.batch, case.kv_heads, case.context, case.dim)
    pairs = [
        (torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype))
        for _ in range(num_copies(case.kv_bytes, device))
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    calls: list[Callable[[], object]] = [
        lambda k=k, v=v: attend(query, k, v, enable_gqa=True)  # type: ignore[misc]
        for k, v in pairs
    ]
    return {**measure(calls, device), "bytes": case.kv_bytes}


def bench(case: Case, device: str, results: Results) -> None:
    """All KV types, while there is time."""
    base: float | None = None
    works = {label: partial(paged, kind, case, device) for label, kind in KV_TYPES.items()}
    for label, work in {**works, SDPA: partial(sdpa, case, device)}.items():
        row = results.attempt(work, batch=case.batch, context=case.context, kind=label)
        if device == "cuda":
            torch.cuda.empty_cache()
        if row is None:
            continue
        if label == "quantkit bf16":
            base = row["us"]
        bandwidth = row["bytes"] / row["us"] * 1e6
        results.extend(
            row,
            speedup_to_own_bf16=base / row["us"] if base else None,
            gigabytes_per_s=bandwidth / 1e9,
            share_of_copy=bandwidth / results.meta["copy_bandwidth"],
        )
    results.finish()


if __name__ == "__main__":
    arguments = parse()
    with torch.inference_mode():
        bench(TINY if arguments.tiny else CASE, arguments.device, open_results("attention", arguments))
