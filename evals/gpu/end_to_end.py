"""Decode steps of an 8B-shaped model by weights, KV type, batch and context; and the whole engine.

A step is the model's forward and the choice of the likeliest token, over a cache that is filled with random numbers.
It is timed as the engine runs it (`eager`) and as a CUDA graph (`graph`), which leaves out what the host adds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
from attention import PAGE, decode_batch, fill
from random_model import make_model
from timing import Results, parse

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.layouts import KVLayout, kv_scheme, page_bytes
from quantkit.runtime.assembly import make_engine
from quantkit.runtime.kv_cache import KVCache
from quantkit.runtime.model import NativeModel
from quantkit.runtime.scheduler import SchedulerOptions
from quantkit.runtime.types import SamplingParams

# Most telling first: each line is one model that is built once.
PLAN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bf16", ("auto", "int8")),
    ("w4a16 head8", ("auto", "int8", "int4", "fp8")),
    ("w4a16", ("auto",)),
    ("w8a8", ("auto", "int8")),
    ("fp8", ("auto", "fp8")),
)
CASES = ((1, 1024), (32, 8192), (8, 1024), (1, 8192), (32, 1024), (8, 8192))
# Weights and KV type with which the engine is run, prompt and new tokens.
ENGINE = (("bf16", "auto"), ("w4a16 head8", "int8"))


def step_times(model: NativeModel, cache: KVCache, batch: ForwardBatch, device: str) -> dict[str, Any]:
    """Milliseconds of a decode step."""

    def step() -> object:
        return model.forward(batch, cache).argmax(-1)

    with torch.inference_mode():
        for _ in range(2):
            step()
        found: dict[str, Any] = {"eager_ms": _milliseconds(step, device)}
        if device == "cuda":
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    step()
                found["graph_ms"] = _milliseconds(graph.replay, device)
            except Exception as error:  # a host sync inside
                torch.cuda.synchronize()
                found["graph"] = f"not captured: {str(error).splitlines()[0][:120]}"
    return found


def _milliseconds(step: Any, device: str) -> float:
    """Median over steps that follow one another without waiting, as far as they let the host run ahead."""
    samples = []
    for _ in range(5 if device == "cuda" else 2):
        count = 4
        _wait(device)
        begun = time.perf_counter()
        for _ in range(count):
            step()
        _wait(device)
        samples.append((time.perf_counter() - begun) / count * 1e3)
    return sorted(samples)[len(samples) // 2]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def kv_bytes(layouts: list[KVLayout], batch: int, context: int) -> int:
    """Bytes of keys and values that a step reads."""
    return round(page_bytes(layouts) / PAGE * batch * context)


def steps(model: NativeModel, weights: str, kv: str, arguments: argparse.Namespace, results: Results) -> None:
    """All batches and contexts of one KV type over one cache."""
    device = arguments.device
    cases = ((2, 100),) if arguments.tiny else CASES
    layouts = model.layouts(kv_scheme(kv), PAGE)
    pages = max(batch * -(-context // PAGE) for batch, context in cases)
    cache = KVCache(layouts, pages, max(batch for batch, _ in cases), device)
    fill(cache)
    for number, (batch, context) in enumerate(cases):
        if kv != "auto" and number >= 4:
            break

        def work(batch: int = batch, context: int = context) -> dict[str, Any]:
            plan, _ = decode_batch(batch, context, device)
            if arguments.tiny:
                plan = dataclasses.replace(plan, token_ids=plan.token_ids % model.vocab_size)
            found = step_times(model, cache, plan, device)
            best = min(value for key, value in found.items() if key.endswith("_ms"))
            moved = model.stored_bytes + kv_bytes(layouts, batch, context)
            found |= {"bytes": moved, "tokens_per_s": batch / best * 1e3, "gigabytes_per_s": moved / best / 1e6}
            if "copy_bandwidth" in results.meta:
                found["share_of_copy"] = found["gigabytes_per_s"] * 1e9 / results.meta["copy_bandwidth"]
            return found

        results.attempt(work, weights=weights, kv=kv, batch=batch, context=context)


def serve(model: NativeModel, kv: str, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine from prompts to tokens: prefill, decode, choice and bookkeeping."""
    prompt, new = (40, 8) if arguments.tiny else (512, 64)
    options = SchedulerOptions(page_size=PAGE, max_sequences=batch, token_budget=max(2048, batch))
    length = prompt + new
    engine = make_engine(
        model, options=options, kv_cache=kv, max_length=length, num_pages=batch * -(-length // PAGE), prefix_cache=False
    )
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)

    def prompts() -> None:
        for _ in range(batch):
            engine.add(torch.randint(0, model.vocab_size, (prompt,), generator=generator).tolist(), params)

    prompts()
    while engine.has_work:
        engine.step()
    prompts()
    begun, times = time.perf_counter(), []
    while engine.has_work:
        engine.step()
        times.append(time.perf_counter())
    decode = [(b - a) * 1e3 for a, b in zip(times[-new // 2 :], times[-new // 2 + 1 :], strict=False)]
    return {
        "seconds": times[-1] - begun,
        "output_tokens_per_s": batch * new / (times[-1] - begun),
        "step_ms": sorted(decode)[len(decode) // 2],
    }


def main() -> None:
    """Write end_to_end.json."""
    arguments = parse(110)
    results = Results("end_to_end", arguments)
    device = torch.device(arguments.device)
    for weights, kinds in PLAN:
        if results.out_of_time:
            break
        begun = time.monotonic()
        model = make_model("tiny" if arguments.tiny else "8B", weights, device)
        _wait(arguments.device)
        print(f"{weights}: {model.stored_bytes / 1e9:.2f} GB per step, built in {time.monotonic() - begun:.1f} s")
        for kv in kinds:
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
            results.guard(lambda kv=kv, model=model, weights=weights: steps(model, weights, kv, arguments, results))
            if (weights, kv) in ENGINE:
                for batch in (1, 2) if arguments.tiny else (1, 32):
                    results.attempt(
                        lambda model=model, kv=kv, batch=batch: serve(model, kv, batch, arguments),
                        engine=True,
                        weights=weights,
                        kv=kv,
                        batch=batch,
                    )
        del model
    results.save()


main()
