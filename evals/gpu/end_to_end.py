"""Decode steps of an 8B-shaped model by weights, KV type, batch and context.

A step is the model's forward and the choice of the likeliest token, over a cache that is filled with random numbers. It
is timed launch by launch (`eager`) and as a CUDA graph (`graph`).
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

from timing import open_results, parse, refuse_nan

# isort: split
import torch
from attention import PAGE, decode_batch, fill
from random_model import make_model
from results import Results, Row, first_line

from quantkit.kernels.layouts import page_bytes
from quantkit.kernels.types import ForwardBatch
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.model import NativeModel

# KV type, batch and context.
BATCHES = tuple(("auto", batch, 1024) for batch in (1, 8, 32))
LONG = (("int4", 32, 8192), ("auto", 32, 8192))
# Weights and cases: batches of each, then long contexts as far as there is time.
PLAN = (("w4a16 head8", BATCHES), ("bf16", BATCHES), ("w4a16 head8", LONG))
TINY_PLAN = tuple((weights, (("auto", 2, 70),)) for weights in ("w4a16 head8", "bf16"))


def _milliseconds(step: Any, device: str, samples: int = 5, count: int = 4) -> float:
    """Median over steps that follow one another without waiting, as far as they let the host run ahead."""
    times = []
    if device != "cuda":
        samples = count = 1
    for _ in range(samples):
        _wait(device)
        begun = time.perf_counter()
        for _ in range(count):
            step()
        _wait(device)
        times.append((time.perf_counter() - begun) / count * 1e3)
    return median(times)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step_times(model: NativeModel, cache: KVCache, batch: ForwardBatch, device: str) -> dict[str, Any]:
    """Milliseconds of a decode step."""

    logits: list[torch.Tensor] = []

    def step() -> object:
        logits[:] = [model.forward(batch, cache)]
        return logits[0].argmax(-1)

    if device == "cuda":
        step()
        step()
        refuse_nan(logits[0])
    times: dict[str, Any] = {"eager_ms": _milliseconds(step, device)}
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
            times["graph_ms"] = _milliseconds(graph.replay, device)
        except Exception as error:  # a host sync inside
            torch.cuda.synchronize()
            times["graph"] = f"not captured: {first_line(error)[:120]}"
    refuse_nan(logits[0])
    return times


def one_step(model: NativeModel, kv: str, batch: int, context: int, device: str) -> dict[str, Any]:
    """Times of a step over a cache of its own."""
    layouts = model.layouts(kv, PAGE)
    stored = round(page_bytes(layouts) / PAGE * batch * context)  # bytes of keys and values that it reads
    if device == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if stored > 0.8 * free:
            raise MemoryError(f"{stored / 1e9:.0f} GB of keys and values, {free / 1e9:.0f} GB free")
    plan, pages = decode_batch(batch, context, device)
    plan.token_ids.remainder_(model.vocab_size)
    cache = KVCache(layouts, pages, batch, device)
    fill(cache)
    model.reserve(context)
    with torch.inference_mode():
        times = step_times(model, cache, plan, device)
    best = min(value for key, value in times.items() if key.endswith("_ms"))
    moved = model.stored_bytes + stored
    return {**times, "bytes": moved, "tokens_per_s": batch / best * 1e3, "gigabytes_per_s": moved / best / 1e6}


def steps(shape: str, weights: str, cases: Iterable[tuple[str, int, int]], results: Results, device: str) -> None:
    """Decode steps of one model, made when the first is measured, while there is time."""
    model = functools.cache(functools.partial(make_model, shape, weights, torch.device(device)))

    def work(kv: str, batch: int, context: int) -> Row:
        return one_step(model(), kv, batch, context, device)

    for kv, batch, context in cases:
        step = functools.partial(work, kv, batch, context)
        if row := results.attempt(step, weights=weights, kv=kv, batch=batch, context=context):
            results.extend(row, share_of_copy=row["gigabytes_per_s"] * 1e9 / results.meta["copy_bandwidth"])


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All of the plan, while there is time; one model at a time, for its memory is needed."""
    for weights, cases in TINY_PLAN if arguments.tiny else PLAN:
        steps("tiny" if arguments.tiny else "8B", weights, cases, results, arguments.device)
    results.finish()


if __name__ == "__main__":
    options = parse(110)
    bench(options, open_results("end_to_end", options, row_seconds=120))
