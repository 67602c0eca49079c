"""An 8B-shaped model: decode steps by weights, KV type, batch and context, the engine's own share, time to first token.

A step is the model's forward and the choice of the likeliest token, over a cache that is filled with random numbers. It
is timed launch by launch (`eager`) and as a CUDA graph (`graph`). The engine is timed from outside: `step_ms` between
its steps, `gpu_ms` between events around the model on the GPU's own clock; what is left is the host's share, which is
hidden where the next step is launched before the last one's tokens are read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from timing import Results, parse

# isort: split
import torch
from attention import PAGE, decode_batch, fill
from random_model import make_model

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.layouts import KVLayout, page_bytes
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.model import NativeModel
from quantkit.runtime.types import SamplingParams

KV_TYPES = ("auto", "int8", "fp8", "int4")
# Weights, each built once, most telling first; and by when of the time the next one is begun.
PLAN = (("bf16", 0.3), ("w4a16 head8", 0.65), ("fp8", 0.78), ("w8a8", 0.9), ("w4a16", 1.0))
# KV type, batch and context, most telling first.
TELLING = (("auto", 1, 1024), ("auto", 32, 8192), ("int4", 32, 8192), ("int8", 32, 8192), ("fp8", 32, 8192))
TELLING += (("int8", 1, 1024), ("int4", 1, 1024))
REST = tuple(
    (kv, batch, context)
    for batch, context in ((8, 1024), (1, 8192), (32, 1024), (8, 8192), (1, 32768), (8, 32768), (32, 32768))
    for kv in KV_TYPES
)
# How the engine runs: graphs, overlap.
WAYS = {"graph, overlap": (True, True), "graph": (True, False), "eager": (False, False)}
PROMPTS = (512, 2048, 8192)


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

    def step() -> object:
        logits = model.forward(batch, cache)
        return logits.values.argmax(-1) if logits.best is None else logits.best

    if device == "cuda":
        step()
        step()
    times: dict[str, Any] = {"eager_ms": _milliseconds(step, device)}
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
            times["graph_ms"] = _milliseconds(graph.replay, device)
        except Exception as error:  # a host sync inside
            torch.cuda.synchronize()
            times["graph"] = f"not captured: {str(error).splitlines()[0][:120]}"
    return times


def kv_bytes(layouts: list[KVLayout], batch: int, context: int) -> int:
    """Bytes of keys and values that a step reads."""
    return round(page_bytes(layouts) / PAGE * batch * context)


def one_step(model: NativeModel, kv: str, batch: int, context: int, device: str) -> dict[str, Any]:
    """Times of a step over a cache of its own."""
    layouts = model.layouts(kv, PAGE)
    stored = kv_bytes(layouts, batch, context)
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


def steps(
    model: NativeModel,
    weights: str,
    cases: tuple[tuple[str, int, int], ...],
    until: float,
    results: Results,
    device: str,
    launches: dict[str, float],
) -> None:
    """Decode steps while there is time for this model."""
    for kv, batch, context in cases:
        if results.used > until:
            return
        labels = {"weights": weights, "kv": kv, "batch": batch, "context": context}
        if results.attempt(partial(one_step, model, kv, batch, context, device), part="step", **labels):
            bandwidth = results.rows[-1]["gigabytes_per_s"] * 1e9
            results.extend(
                share_of_copy=bandwidth / results.meta["copy_bandwidth"],
                launches_per_layer=launches.get(f"{weights}, {kv}"),
            )


@contextmanager
def _engine(model: NativeModel, kv: str, batch: int, length: int, way: str) -> Iterator[Engine]:
    """An engine for this many sequences of this length, run in one of the ways."""
    graphs, overlap = WAYS[way]
    config = EngineConfig(
        page_size=PAGE,
        max_sequences=batch,
        token_budget=max(8192, batch),
        kv_cache=kv,
        max_length=length,
        num_pages=batch * -(-length // PAGE),
        prefix_cache=False,
        overlap=None if overlap else False,
    )
    saved = os.environ.get("QUANTKIT_CUDA_GRAPHS")
    os.environ["QUANTKIT_CUDA_GRAPHS"] = "1" if graphs else "0"
    try:
        yield build_engine(model, config)
    finally:
        os.environ.pop("QUANTKIT_CUDA_GRAPHS")
        if saved is not None:
            os.environ["QUANTKIT_CUDA_GRAPHS"] = saved


def serve(model: NativeModel, kv: str, batch: int, prompt: int, new: int, way: str) -> dict[str, Any]:
    """Decode steps of the whole engine: what a step takes, and what of it the GPU computes."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    on_gpu = model.device.type == "cuda"
    with _engine(model, kv, batch, prompt + new, way) as engine:
        for turn in range(2 if on_gpu else 1):  # the first captures the graphs
            events = _record_events(engine) if on_gpu and turn else []
            for _ in range(batch):
                engine.add(torch.randint(0, model.vocab_size, (prompt,), generator=generator).tolist(), params)
            begun, times = time.perf_counter(), []
            while engine.has_work:
                engine.step()
                times.append(time.perf_counter())
        status = engine.runner.graph_status
    half = new // 2
    times: dict[str, Any] = {
        "seconds": times[-1] - begun,
        "output_tokens_per_s": batch * new / (times[-1] - begun),
        "step_ms": median((b - a) * 1e3 for a, b in zip(times[-half:-1], times[1 - half :], strict=True)),
        "graphs": status or "none",
    }
    if events:
        torch.cuda.synchronize()
        gpu = median(first.elapsed_time(last) for first, last in events[-half:])
        times |= {"gpu_ms": gpu, "host_share": max(0.0, 1 - gpu / times["step_ms"])}
    return times


def _record_events(engine: Engine) -> list[tuple[Any, Any]]:
    """Events around each run of the model."""
    events: list[tuple[Any, Any]] = []
    run = engine.runner.step

    def timed(*values: Any, **named: Any) -> Any:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        result = run(*values, **named)
        pair[1].record()
        events.append(pair)
        return result

    engine.runner.step = timed  # type: ignore[method-assign]
    return events


def first_token(model: NativeModel, kv: str, prompt: int) -> dict[str, Any]:
    """Time from a prompt to its first token; the second of two, whose kernels are compiled."""
    generator = torch.Generator().manual_seed(0)
    seconds = []
    with _engine(model, kv, 1, prompt + 8, "eager") as engine:
        for _ in range(2 if model.device.type == "cuda" else 1):
            ids = torch.randint(0, model.vocab_size, (prompt,), generator=generator).tolist()
            engine.add(ids, SamplingParams(max_tokens=1, ignore_eos=True))
            begun = time.perf_counter()
            while engine.has_work:
                engine.step()
            seconds.append(time.perf_counter() - begun)
    return {"ttft_ms": seconds[-1] * 1e3, "prompt_tokens_per_s": prompt / seconds[-1]}


def engine_rows(model: NativeModel, weights: str, results: Results, tiny: bool) -> None:
    """The engine around one model: batches in every way, and prompts."""
    batches, prompt, new = ((2,), 9, 4) if tiny else ((32, 1), 512, 64)
    for kv in ("int4",) if weights == "w4a16 head8" else ("auto",):
        for batch in batches:
            for way in WAYS if not tiny else ("graph, overlap",):
                results.attempt(
                    partial(serve, model, kv, batch, prompt, new, way),
                    part="engine",
                    weights=weights,
                    kv=kv,
                    batch=batch,
                    context=prompt,
                    way=way,
                )
        for length in (9,) if tiny else PROMPTS:
            results.attempt(
                partial(first_token, model, kv, length),
                part="first token",
                weights=weights,
                kv=kv,
                batch=1,
                context=length,
            )


def _count_launches(tiny: bool) -> subprocess.Popen[str]:
    """Begin to count the launches of a step; a process of its own, because there they are not made."""
    command = [sys.executable, str(Path(__file__).with_name("step_count.py")), "--json"]
    command += ["--shape", "tiny"] if tiny else ["--batch", "8"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All models, while there is time."""
    device = torch.device(arguments.device)
    counting = _count_launches(arguments.tiny)
    begun = time.monotonic()
    model: NativeModel | None = None
    launches: dict[str, float] = {}
    for weights, until in PLAN[::3] if arguments.tiny else PLAN:
        if results.out_of_time:
            break
        model = None  # its memory is needed
        model = make_model("tiny" if arguments.tiny else "8B", weights, device)
        _wait(arguments.device)
        print(f"{weights}: {model.stored_bytes / 1e9:.2f} GB per step, at {time.monotonic() - begun:.1f} s", flush=True)
        if not launches:
            said, _ = counting.communicate()
            launches = json.loads(said.splitlines()[-1]) if counting.returncode == 0 else {"none": 0.0}
        telling = (("int4", 2, 70),) if arguments.tiny else TELLING
        steps(model, weights, telling, 1.0 if arguments.tiny else until, results, arguments.device, launches)
        if weights in ("bf16",) if arguments.tiny else ("bf16", "w4a16 head8"):
            engine_rows(model, weights, results, arguments.tiny)
        if not arguments.tiny:
            steps(model, weights, REST, until, results, arguments.device, launches)
    results.save()


if __name__ == "__main__":
    options = parse(110)
    bench(options, Results("end_to_end", options))
