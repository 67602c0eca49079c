"""Benchmark of one model, or of two in alternating rounds: latencies, memory, and the machine's limits.

`compare_cache` measures the time that a KV cache saves: it generates a text with the cache, and again by recomputing
the whole context for each token. Recomputing uses the same engine, kernels and chunks: each token is a separate request
whose prompt is all text before the token. So the cache is the only difference.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantkit.benchmark.ceilings import (
    Ceilings,
    Cost,
    decode_record,
    linear_kinds,
    measure_ceilings,
    model_cost,
    prefill_record,
)
from quantkit.benchmark.compare import measure_rounds
from quantkit.benchmark.memory import memory_records
from quantkit.benchmark.memory_prediction import Prediction, predict
from quantkit.benchmark.options import BenchmarkOptions
from quantkit.benchmark.workload import check_capacity, run_load
from quantkit.checkpoints.folder import resolve
from quantkit.machine.devices import pick_device, processor_name
from quantkit.quantities import dtype_name
from quantkit.results import BenchmarkResult, BenchmarkRun, RequestTiming
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import Completion, SamplingParams
from quantkit.runtime.vllm_engine import VllmLLM

_MARKS = (1, 10, 30, 100, 300, 1000, 3000, 10_000)  # numbers of new tokens at which both ways are compared
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkTarget:
    """A model loaded for measurement.

    Args:
        name: name given by the user.
        llm: the model, loaded without prefix cache.
        prediction: prediction of the model's memory, made before loading; None if there is none.
        cost: bytes and operations of the model's steps.
    """

    name: str
    llm: LLM
    prediction: Prediction | None
    cost: Cost


def check_target(
    model: str | Path | None, options: BenchmarkOptions, engine: Mapping[str, Any] | None = None
) -> tuple[Path, Prediction | None]:
    """Find a model, predict its memory, and check that every request fits, before any expensive work.

    Args:
        model, options, engine: see `load_target`.
    Raises:
        RequestError: the prompts are too long.
        ModelError: there is no such model.
    """
    settings = engine or {}
    path = resolve(model)
    known = {name: settings[name] for name in ("dtype", "kv_cache", "page_size", "head_dtype") if name in settings}
    mtp = settings.get("speculate") == "mtp"
    prediction = predict(path, device=pick_device(settings.get("device", "auto")), mtp=mtp, **known)
    if prediction is not None:
        longest = prediction.config.max_length
        longest = min(longest, settings.get("max_length") or longest)
        check_capacity(options.workloads(), longest, f"the context of {_name(model)}")
    return path, prediction


def load_target(
    model: str | Path | None, options: BenchmarkOptions, engine: Mapping[str, Any] | None = None
) -> BenchmarkTarget:
    """Load a model for measurement.

    Args:
        model: directory or hub id; None = the demo model.
        options: what to measure.
        engine: keyword arguments of `LLM`.
    Raises:
        RequestError: the prompts are too long; see also `LLM`.
    """
    path, prediction = check_target(model, options, engine)
    # Static batches repeat the prompts of the closed loop, which a prefix cache would not compute a second time.
    llm = LLM(path, **{"max_sequences": options.max_sequences, "prefix_cache": False, **(engine or {})})
    check_capacity(options.workloads(), llm.engine.capacity, f"the memory for one sequence of {_name(model)}")
    cache = llm.engine.runner.cache
    cost = model_cost(llm.model, () if cache is None else cache.layouts)
    cost = replace(cost, kv_budget=llm.stats()["kv_budget"])
    return BenchmarkTarget(name=_name(model), llm=llm, prediction=prediction, cost=cost)


def _name(model: str | Path | None) -> str:
    return "demo model" if model is None else str(model)


def find_ceilings(targets: Sequence[BenchmarkTarget]) -> Ceilings:
    """Measure the machine's memory bandwidth, and its compute rate in every number type that the targets use."""
    types = {getattr(torch, target.cost.product) for target in targets}
    types |= {target.llm.model.dtype for target in targets}
    return measure_ceilings(targets[0].llm.device, tuple(sorted(types, key=str)))


def measure_targets(
    targets: Sequence[BenchmarkTarget],
    options: BenchmarkOptions,
    ceilings: Ceilings,
    progress: Progress = lambda _: None,
) -> list[BenchmarkResult]:
    """Measure one model, or several in alternating rounds with the same requests; see `compare`.

    Args:
        targets: loaded, idle models.
        options: what to measure.
        ceilings: limits of the machine, measured just before.
        progress: called with a description of the current work.
    """
    # Prompts contain only tokens that all models know, so models with different vocabularies get the same requests.
    runs = measure_rounds(
        options,
        [target.name for target in targets],
        lambda who, load: run_load(targets[who].llm.engine, load),
        vocab_size=min(target.llm.model.vocab_size for target in targets),
        avoid={token for target in targets for token in target.llm.model.eos_ids},
        progress=progress,
    )
    return [_finish(target, options, tuple(own_runs), ceilings) for target, own_runs in zip(targets, runs, strict=True)]


def measure_served(
    path: str | Path | None,
    options: BenchmarkOptions,
    vllm: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    progress: Progress = lambda _: None,
) -> BenchmarkResult:
    """Load a model into vLLM, measure every workload as for quantkit's engine, and unload the model.

    Memory is not reported, because vLLM reserves more than a model needs; ceilings are not reported either.

    Args:
        path: directory or hub id; None = the demo model.
        options: what to measure.
        vllm: vLLM's own settings.
        settings: fields of `EngineConfig`.
        progress: called with a description of the current work.
    Raises:
        QuantkitError: see `VllmLLM`; or the prompts are too long.
    """
    name = _name(path)
    progress(f"loading {name} into vLLM")
    # Static batches repeat the prompts of the closed loop, which a prefix cache would not compute a second time.
    with VllmLLM(path, options={"enable_prefix_caching": False, **vllm}, **(settings or {})) as llm:
        check_capacity(options.workloads(), llm.capacity, f"the context of {name}")
        avoid = () if llm.tokenizer is None else tuple(llm.tokenizer.all_special_ids)
        (runs,) = measure_rounds(
            options,
            [name],
            lambda _, load: run_load(llm, load),
            vocab_size=llm.vocab_size,
            avoid=avoid,
            progress=progress,
        )
        return BenchmarkResult(
            model=name,
            runs=tuple(runs),
            kv_cache=llm.kv_type,
            device=llm.device_name or processor_name() or "CPU",
            settings={"engine": llm.engine_name, "computed in": llm.arithmetic, **{k: str(v) for k, v in vllm.items()}},
        )


def _finish(
    target: BenchmarkTarget, options: BenchmarkOptions, runs: tuple[BenchmarkRun, ...], ceilings: Ceilings
) -> BenchmarkResult:
    engine, cost = target.llm.engine, target.cost
    budget = engine.config.token_budget
    decode = [decode_record(run, cost, ceilings) for run in runs if run.workload.mode == "closed"]
    prefill = [prefill_record(run, cost, ceilings, budget) for run in runs]
    first = next((record for record in prefill if record is not None), None)
    records = {(r.phase, r.batch, r.context): r for r in (first, *decode) if r is not None}
    pages = engine.pool.num_pages
    return BenchmarkResult(
        model=target.name,
        runs=runs,
        # Measured after the timed runs, because tracking every tensor slows the steps down.
        memory=memory_records(target.llm, target.prediction, options),
        roofline=tuple(records.values()),
        kv_cache=target.llm.kv_type,
        capacity_tokens=pages * engine.config.page_size if engine.runner.cache is not None else None,
        device=_device_name(target.llm.device),
        settings=_settings(target, ceilings),
        acceptance=tuple(target.llm.stats()["acceptance_by_position"]),
    )


def _settings(target: BenchmarkTarget, ceilings: Ceilings) -> dict[str, str]:
    options = target.llm.engine.config
    kinds = linear_kinds(target.llm.model)
    return {
        "computed in": dtype_name(target.llm.model.dtype),
        "threads": str(ceilings.threads),
        "page size": str(options.page_size),
        "token budget": str(options.token_budget),
        "max sequences": str(options.max_sequences),
        "prefix cache": "off",
        "linears": "; ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "by transformers",
        "memory ceiling": f"{ceilings.bytes_per_s / 1e9:.1f} GB/s",
        **{f"GEMM ceiling, {name}": f"{rate / 1e9:.0f} GFLOP/s" for name, rate in ceilings.flops_per_s.items()},
        **{name: text for name, text in target.llm.describe().items() if name in ("speculation", "KV budget", "notes")},
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() or "CPU"


class Mark(NamedTuple):
    """Seconds until `new_tokens` tokens were generated, with the cache and by recomputing, and the ratio of the two."""

    new_tokens: int
    cached_s: float
    recomputed_s: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheComparison:
    """Timings of the same text generated with and without the cache.

    Args:
        cached, recomputed: timestamps of the tokens, generated with the cache and by recomputing.
        num_same: number of leading new tokens that are equal in both texts. Later tokens may differ after a tie,
            because batches round differently.
    """

    cached: RequestTiming
    recomputed: RequestTiming
    num_same: int

    def marks(self) -> list[Mark]:
        """Return the times until 1, 10, 30, 100, 300, ... tokens and until the last token."""
        count = self.cached.num_new_tokens
        numbers = [*(mark for mark in _MARKS if mark < count), count]
        ways = ([way.token_s[n - 1] - way.arrived_s for n in numbers] for way in (self.cached, self.recomputed))
        return [Mark(n, cached, slow, slow / cached) for n, cached, slow in zip(numbers, *ways, strict=True)]


def compare_cache(
    llm: LLM, prompt: Sequence[int], new_tokens: int, progress: Callable[[int], None] = lambda _: None
) -> CacheComparison:
    """Time greedy generation with the KV cache, and by recomputing the whole context for each token.

    Args:
        llm: an idle model with its prefix cache off.
        prompt: token ids.
        new_tokens: number of tokens to generate.
        progress: called with the number of tokens recomputed so far.
    """
    generate_by_recomputing(llm, prompt, 2)  # warm-up
    _generate(llm, prompt, 2)
    cached = _generate(llm, prompt, new_tokens)
    ids, recomputed = generate_by_recomputing(llm, prompt, new_tokens, progress)
    same = next((i for i, (a, b) in enumerate(zip(ids, cached.token_ids, strict=True)) if a != b), new_tokens)
    return CacheComparison(cached=cached.timing, recomputed=recomputed, num_same=same)


def generate_by_recomputing(
    llm: LLM, prompt: Sequence[int], new_tokens: int, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[int], RequestTiming]:
    """Generate each token greedily from a prefill of all text before it; return the new tokens and their timestamps."""
    ids, timings = list(prompt), list[RequestTiming]()
    for _ in range(new_tokens):
        completion = _generate(llm, ids, 1)
        ids.extend(completion.token_ids)
        timings.append(completion.timing)
        progress(len(timings))
    times = tuple(timing.token_s[0] for timing in timings)
    return ids[len(prompt) :], replace(timings[0], token_s=times, finished_s=times[-1])


def _generate(llm: LLM, prompt: Sequence[int], new_tokens: int) -> Completion:
    return llm.generate(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))[0]
