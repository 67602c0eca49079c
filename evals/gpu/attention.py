"""Paged attention by KV type: decode steps by batch and context, chunks of prompts by prefix; and torch's.

A decode step is bound by the bytes of keys and values, so its rows have the share of the copy bandwidth; a chunk by
arithmetic, so its rows have the share of the rate of a large product.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from results import Results
from timing import dtype_on, gemm_rate, measure, num_copies, open_results, parse
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from quantkit.kernels.layouts import KVLayout, kv_scheme, page_bytes
from quantkit.kernels.types import AttentionOptions, ForwardBatch
from quantkit.numerics.kv_cache import LayerCache
from quantkit.runtime.cache.kv_cache import KVCache


@dataclass(frozen=True)
class Case:
    """What is attended to.

    Args:
        batch, context, new: B, C and L.
        heads, kv_heads, dim, page: of the model and the cache.
    """

    batch: int
    context: int
    new: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 64

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in bf16."""
        return 4 * self.batch * self.context * self.kv_heads * self.dim

    @property
    def flop(self) -> float:
        """Of both products, causal."""
        pairs = self.new * (self.context - self.new) + self.new * (self.new + 1) / 2
        return 4.0 * self.batch * self.heads * self.dim * pairs


KV_TYPES = ("auto", "int8", "fp8", "int4")
SDPA = "torch sdpa bf16, contiguous"
PAGE = 64
# Most telling first.
DECODE = ((32, 8192), (32, 4096), (1, 1024), (8, 4096), (1, 8192), (1, 2048), (1, 32768), (128, 2048))
# Batch, new tokens, tokens before them.
PREFILL = ((1, 2048, 0), (1, 2048, 6144), (1, 8192, 0), (8, 512, 2048), (32, 4, 8188))
TINY = Case(batch=2, context=70, heads=4, kv_heads=2, dim=32, page=16)
TINY_PREFILL = Case(batch=1, context=40, new=20, heads=4, kv_heads=2, dim=32, page=16)


def make_batch(case: Case, device: str, table: torch.Tensor | None = None) -> tuple[ForwardBatch, int]:
    """`new` tokens at the end of each sequence, pages as given or in shuffled order; and the number of pages."""
    pages = -(-case.context // case.page)
    if table is None:
        table = torch.randperm(case.batch * pages).view(case.batch, pages)
    positions = torch.arange(case.context - case.new, case.context)
    slots = table[:, positions // case.page] * case.page + positions % case.page  # (B, L)
    return ForwardBatch(
        token_ids=torch.randint(0, 1000, (case.batch * case.new,)).to(device),
        positions=positions.repeat(case.batch).to(device),
        query_starts=(torch.arange(case.batch + 1, dtype=torch.int32) * case.new).to(device),
        page_table=table.to(device, torch.int32),
        slots=slots.flatten().to(device),
        residual_rows=torch.arange(case.batch, device=device),
        logit_rows=(torch.arange(1, case.batch + 1) * case.new - 1).to(device),
        query_lengths=(case.new,) * case.batch,
        context_lengths=(case.context,) * case.batch,
        sequence_ids=tuple(range(case.batch)),
    ), case.batch * pages


def decode_batch(batch: int, context: int, device: str, page_size: int = PAGE) -> tuple[ForwardBatch, int]:
    """One new token for each of `batch` sequences of `context` tokens."""
    return make_batch(Case(batch=batch, context=context, page=page_size), device)


def fill(cache: KVCache) -> None:
    """Random bytes that are small, ordinary numbers in every type."""
    for memory in (*cache._pools, *cache._residuals):
        memory.view(torch.uint8).random_(0, 0x3F)


def paged(kind: str, case: Case, device: str) -> dict[str, Any]:
    """Time of attention, store included, over caches that rotate."""
    dtype = dtype_on(device)
    sizes = {"num_heads": case.kv_heads, "head_dim": case.dim, "page_size": case.page}
    layout = KVLayout(**sizes, dtype=dtype, cache=LayerCache(scheme=kv_scheme(kind)))
    step, num_pages = make_batch(case, device)
    size = page_bytes([layout]) * num_pages
    caches = [KVCache([layout], num_pages, case.batch, device) for _ in range(num_copies(size, device))]
    for cache in caches:
        fill(cache)
    tokens = case.batch * case.new
    query = torch.randn(tokens, case.heads, case.dim, device=device, dtype=dtype)
    key, value = (torch.randn(tokens, case.kv_heads, case.dim, device=device, dtype=dtype) for _ in range(2))
    options = AttentionOptions(scale=case.dim**-0.5)
    timing = measure(
        [lambda cache=cache: cache.attention[0]((query, key, value), step, options) for cache in caches], device
    )
    return {**timing, "bytes": size}


def _contiguous(case: Case, device: str) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Queries (B, H, L, D), and rotating keys and values (B, Hkv, C, D)."""
    dtype = dtype_on(device)
    query = torch.randn(case.batch, case.heads, case.new, case.dim, device=device, dtype=dtype)
    shape = (case.batch, case.kv_heads, case.context, case.dim)
    pairs = [
        (torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype))
        for _ in range(num_copies(case.kv_bytes, device))
    ]
    return query, pairs


def sdpa(case: Case, device: str) -> dict[str, Any]:
    """Time of torch's scaled_dot_product_attention over contiguous keys and values."""
    query, pairs = _contiguous(case, device)
    attend = torch.nn.functional.scaled_dot_product_attention
    mask = causal_lower_right(case.new, case.context) if case.new > 1 else None
    calls: list[Callable[[], object]] = [
        lambda k=k, v=v: attend(query, k, v, attn_mask=mask, enable_gqa=True)  # type: ignore[misc]
        for k, v in pairs
    ]
    return {**measure(calls, device), "bytes": case.kv_bytes}


def bench(plan: Iterable[tuple[Case, str]], device: str, results: Results) -> None:
    """All cases, while there is time."""
    base: dict[Case, float] = {}
    for case, kind in plan:
        label = "quantkit bf16" if kind == "auto" else kind if kind == SDPA else f"quantkit {kind}"
        work = partial(sdpa, case, device) if kind == SDPA else partial(paged, kind, case, device)
        row = results.attempt(work, batch=case.batch, context=case.context, new=case.new, kind=label)
        if device == "cuda":
            torch.cuda.empty_cache()
        if row is None:
            continue
        if kind == "auto":
            base[case] = row["us"]
        bandwidth, rate = row["bytes"] / row["us"] * 1e6, case.flop / row["us"] * 1e6
        results.extend(
            row,
            speedup_to_own_bf16=base[case] / row["us"] if case in base else None,
            gigabytes_per_s=bandwidth / 1e9,
            share_of_copy=bandwidth / results.meta["copy_bandwidth"],
            teraflops=rate / 1e12,
            share_of_gemm=rate / results.meta["gemm_rate"],
        )
    results.finish()


def plan_of(arguments: argparse.Namespace) -> list[tuple[Case, str]]:
    """Cases and kinds, most telling first."""
    if arguments.prefill:
        cases = [Case(batch=batch, context=new + before, new=new) for batch, new, before in PREFILL]
    else:
        cases = [Case(batch=batch, context=context) for batch, context in DECODE]
    if arguments.tiny:
        cases = [TINY_PREFILL if arguments.prefill else TINY]
    if arguments.first:
        cases = cases[:1]
    return [(case, kind) for case in cases for kind in (*KV_TYPES, SDPA)]


def main() -> None:
    """Write attention.json, or prefill.json."""
    arguments = parse(prefill="chunks of prompts, not decode steps", first="only the first case")
    results = open_results("prefill" if arguments.prefill else "attention", arguments)
    results.meta["gemm_rate"] = gemm_rate(128 if arguments.tiny else 8192, arguments.device)
    bench(plan_of(arguments), arguments.device, results)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
