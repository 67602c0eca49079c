"""Paged decode attention by KV type, batch and context, against SDPA over contiguous bf16 keys and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import Results, parse

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.layouts import kv_scheme, make_layout, page_bytes
from quantkit.measure.timing import measure, num_copies
from quantkit.runtime.kv_cache import KVCache

KV_TYPES = ("auto", "fp8", "int8", "int4")
# (batch, context); heads of an 8B model.
CASES = ((32, 8192), (32, 4096), (1, 1024), (8, 4096), (1, 8192), (1, 32768), (128, 2048))
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64


def decode_batch(batch: int, context: int, device: str, page_size: int = PAGE) -> tuple[ForwardBatch, int]:
    """One new token for each of `batch` sequences of `context` tokens, pages in shuffled order; and their number."""
    pages = -(-context // page_size)
    table = torch.randperm(batch * pages).view(batch, pages)
    position = context - 1
    return ForwardBatch(
        token_ids=torch.randint(0, 1000, (batch,)).to(device),
        positions=torch.full((batch,), position, device=device),
        query_starts=torch.arange(batch + 1, dtype=torch.int32, device=device),
        page_table=table.to(device, torch.int32),
        slots=(table[:, position // page_size] * page_size + position % page_size).to(device),
        tail_rows=torch.arange(batch, device=device),
        logit_rows=torch.arange(batch, device=device),
        query_lengths=(1,) * batch,
        context_lengths=(context,) * batch,
        sequence_ids=tuple(range(batch)),
    ), batch * pages


def fill(cache: KVCache) -> None:
    """Random bytes that are small, ordinary numbers in every type."""
    for memory in (*cache._pools, *(tail for tail in cache._tails if tail is not None)):
        memory.view(torch.uint8).random_(0, 0x3F)


def paged(kind: str, batch: int, context: int, device: str) -> dict[str, Any]:
    """Time of attention, store included, over caches that rotate."""
    layout = make_layout(num_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, dtype=torch.bfloat16, scheme=kv_scheme(kind))
    step, num_pages = decode_batch(batch, context, device)
    size = page_bytes([layout]) * num_pages
    caches = [KVCache([layout], num_pages, batch, device) for _ in range(num_copies(size, device))]
    for cache in caches:
        fill(cache)
    query = torch.randn(batch, HEADS, DIM, device=device, dtype=torch.bfloat16)
    key, value = (torch.randn(batch, KV_HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    found = measure(
        [lambda cache=cache: cache.attend(0, query, key, value, step, scale=DIM**-0.5) for cache in caches], device
    )
    return _with_bandwidth(found, size)


def contiguous(batch: int, context: int, device: str) -> dict[str, Any]:
    """Time of torch's SDPA over keys and values that lie in one piece."""
    size = 4 * batch * context * KV_HEADS * DIM
    query = torch.randn(batch, HEADS, 1, DIM, device=device, dtype=torch.bfloat16)
    pairs = [
        [torch.randn(batch, KV_HEADS, context, DIM, device=device, dtype=torch.bfloat16) for _ in range(2)]
        for _ in range(num_copies(size, device))
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    calls: list[Callable[[], object]] = [
        lambda key=key, value=value: attend(query, key, value, enable_gqa=True) for key, value in pairs
    ]
    return _with_bandwidth(measure(calls, device), size)


def _with_bandwidth(found: dict[str, Any], size: int) -> dict[str, Any]:
    return {**found, "bytes": size, "gigabytes_per_s": size / found["us"] / 1e3}


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All cases, while there is time."""
    ceiling = results.meta.get("copy_bandwidth")
    for batch, context in ((2, 130),) if arguments.tiny else CASES:
        base: float | None = None
        work = {kind: partial(paged, kind, batch, context, arguments.device) for kind in KV_TYPES}
        work["torch sdpa bf16, contiguous"] = partial(contiguous, batch, context, arguments.device)
        for kind, run in work.items():
            label = "quantkit bf16" if kind == "auto" else kind if "torch" in kind else f"quantkit {kind}"
            found = results.attempt(run, batch=batch, context=context, kind=label)
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
            if found is None:
                continue
            base = found["us"] if kind == "auto" else base
            if base:
                results.rows[-1]["speedup_to_own_bf16"] = base / found["us"]
            if ceiling:
                results.rows[-1]["share_of_copy"] = found["gigabytes_per_s"] * 1e9 / ceiling
    results.save()


if __name__ == "__main__":
    options = parse()
    with torch.inference_mode():
        bench(options, Results("attention", options))
