"""An 8B-shaped model: decode steps by weights, KV type, batch and context, the engine's own share, time to first token.

A step is the model's forward and the choice of the likeliest token, over a cache that is filled with random numbers. It
is timed launch by launch (`eager`) and as a CUDA graph (`graph`). The engine is timed from outside: `step_ms` between
its steps, `gpu_ms` between events around the model on the GPU's own clock; what is left is the host's share, which is
hidden where the next step is launched before the last one's tokens are read.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

from timing import open_results, parse, refuse_nan

# isort: split
import torch
from attention import PAGE, decode_batch, fill
from random_model import make_model
from results import Results, Row, first_line

from quantkit.kernels.layouts import KVLayout, page_bytes
from quantkit.kernels.types import ForwardBatch
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.model import NativeModel
from quantkit.runtime.types import SamplingParams

KV_TYPES = ("auto", "int8", "fp8", "int4")
# KV type, batch and context, most telling first.
TELLING = (("auto", 1, 1024), ("auto", 32, 8192), ("int4", 32, 8192), ("int8", 32, 8192), ("fp8", 32, 8192))
TELLING += (("int8", 1, 1024), ("int4", 1, 1024))
REST = tuple(
    (kv, batch, context)
    for batch, context in ((8, 1024), (1, 8192), (32, 1024), (8, 8192), (1, 32768), (8, 32768), (32, 32768))
    for kv in KV_TYPES
)
ENGINE = ()
# Weights and cases of steps, or the engine, most telling first; the first entries are a part of their own.
PLAN = (
    ("bf16", TELLING),
    ("w4a16 head8", TELLING),
    ("w4a16 head8", ENGINE),
    ("bf16", ENGINE),
    ("bf16", REST),
    ("fp8", TELLING),
    ("w8a8", TELLING),
    ("w4a16", TELLING),
    ("w4a16 head8", REST),
    ("fp8", REST),
    ("w8a8", REST),
    ("w4a16", REST),
)
NUM_STEPS = 2
# A short call: batches of each, then long contexts as far as there is time.
SHORT = tuple(("auto", batch, 1024) for batch in (1, 8, 32))
LONG = (("int4", 32, 8192), ("auto", 32, 8192))
SHORT_PLAN = (("w4a16 head8", SHORT), ("bf16", SHORT), ("w4a16 head8", LONG))
TINY_PLAN = (("bf16", (("int4", 2, 70),)), ("bf16", ENGINE), ("w8a8", (("int4", 2, 70),)))
TINY_SHORT_PLAN = tuple((weights, (("auto", 2, 70),)) for weights in ("w4a16 head8", "bf16"))
Plan = tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...]
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


def steps(models: Models, weights: str, cases: Iterable[tuple[str, int, int]], results: Results, device: str) -> None:
    """Decode steps of one model, while there is time."""
    for kv, batch, context in cases:
        work = models.with_model(weights, one_step, kv, batch, context, device)
        if row := results.attempt(work, part="step", weights=weights, kv=kv, batch=batch, context=context):
            results.extend(row, share_of_copy=row["gigabytes_per_s"] * 1e9 / results.meta["copy_bandwidth"])


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
    with mock.patch.dict(os.environ, QUANTKIT_CUDA_GRAPHS="1" if graphs else "0"):
        yield build_engine(model, config)


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


def engine_rows(models: Models, weights: str, results: Results, tiny: bool) -> None:
    """The engine around one model: batches in every way, and prompts."""
    batches, prompt, new = ((2,), 9, 4) if tiny else ((32, 1), 512, 64)
    kv = "int4" if weights == "w4a16 head8" else "auto"
    for batch in batches:
        for way in ("graph, overlap",) if tiny else WAYS:
            work = models.with_model(weights, serve, kv, batch, prompt, new, way)
            results.attempt(work, part="engine", weights=weights, kv=kv, batch=batch, context=prompt, way=way)
    for length in (9,) if tiny else PROMPTS:
        work = models.with_model(weights, first_token, kv, length)
        results.attempt(work, part="first token", weights=weights, kv=kv, batch=1, context=length)


class Models:
    """Models as they are needed; only the last one is kept, for its memory is needed.

    Args:
        shape: see `random_model`.
        device: where.
    """

    def __init__(self, shape: str, device: str) -> None:
        self._shape, self._device = shape, device
        self._weights, self._model, self._problem = "", None, ""

    def with_model(self, weights: str, work: Callable[..., Row], *arguments: Any) -> Callable[[], Row]:
        """A call of `work` with the model and these arguments, which makes the model when it is first called."""
        return lambda: work(self.get(weights), *arguments)

    def get(self, weights: str) -> NativeModel:
        """The model with these weights.

        Raises:
            RuntimeError: it could not be made, now or before.
        """
        if weights != self._weights:
            self._weights, self._model, self._problem = weights, None, ""
            begun = time.monotonic()
            try:
                self._model = make_model(self._shape, weights, torch.device(self._device))
                _wait(self._device)
            except Exception as error:
                self._problem = f"no model: {type(error).__name__}: {first_line(error)}"
            print(f"{weights}: {self._problem or 'a model'} after {time.monotonic() - begun:.1f} s", flush=True)
        if self._model is None:
            raise RuntimeError(self._problem)
        return self._model


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Weights and cases, most telling first."""
    if arguments.tiny:
        return TINY_SHORT_PLAN if arguments.short else TINY_PLAN
    return SHORT_PLAN if arguments.short else PLAN[:NUM_STEPS] if arguments.steps else PLAN


def bench(arguments: argparse.Namespace, results: Results) -> None:
    """All of the plan, while there is time."""
    models = Models("tiny" if arguments.tiny else "8B", arguments.device)
    for weights, what in plan_of(arguments):
        if what == ENGINE:
            engine_rows(models, weights, results, arguments.tiny)
        else:
            steps(models, weights, what, results, arguments.device)
    results.finish()


if __name__ == "__main__":
    options = parse(110, steps="only decode steps of the first entries of the plan", short="those of a short call")
    bench(options, open_results("end_to_end", options, row_seconds=120))
