"""`quantkit bench`: measure latency, throughput and memory of a checkpoint, and name the bottleneck."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from quantkit.benchmark.options import ROUNDS_AGAINST, BenchmarkOptions
from quantkit.cli._options import engine_choice, option_group, ranks_option, runtime_options, settings_of
from quantkit.cli._output import Command, Output
from quantkit.report import speed_tables as show

if TYPE_CHECKING:
    from quantkit.report.table import Table
    from quantkit.results import BenchmarkResult, BenchmarkRun, RooflineRecord

NO_CACHE_TOKENS, NO_CACHE_PROMPT = 1000, 16
ONE_MODEL = (
    "bench measures a model in one process, which has the device to itself; leave out --nproc and torchrun, or serve "
    "the model and give the server's address as --url"
)


@click.command(
    "bench", cls=Command, epilog=f"\b\n{show.DEFINITIONS}", short_help="Measure latency, throughput and memory."
)
@click.argument("checkpoint", required=False)
@click.option("--against", metavar="MODEL", help="Measure this model too, in turns with CHECKPOINT, and compare them.")
@click.option("--url", metavar="URL", help="Measure the server at this address; prompts use CHECKPOINT's vocabulary.")
@click.option("--no-cache", is_flag=True, help="Compare the KV cache with recomputing the context every step; slow.")
@click.option("--batching", type=click.Choice(["static"]), help="Also measure static batches, for comparison.")
@runtime_options
@option_group("workload", settings_of(BenchmarkOptions))
@engine_choice
@partial(ranks_option, refusal=ONE_MODEL)
def command(
    output_to: Output,
    *,
    engine: dict[str, Any],
    checkpoint: str | None,
    against: str | None,
    url: str | None,
    no_cache: bool,
    batching: str | None,
    workload: dict[str, Any],
    vllm: dict[str, Any] | None,
) -> None:
    """Measure CHECKPOINT, a directory or a hub id; without it, the bundled demo model.

    Prompts are random tokens, and every request runs to its full length. Run nothing else on the machine meanwhile.

    \b
    MBU, MFU: the share of the memory bandwidth, and of the speed of a large
    matrix product, that a step reaches. Both are measured in the same run.

    \b
    Examples:
      quantkit bench
      quantkit bench demo-awq-int4 --against quantkit/demo/model --batch 1,8
      quantkit bench --rate 4 --requests 40 --ttft-limit 0.5 --tpot-limit 0.05
      quantkit bench --no-cache
      quantkit bench --url http://127.0.0.1:8000 --batch 1,32
    """
    if url and (no_cache or against or batching or engine or vllm is not None):
        raise click.UsageError("--url measures a running server; give only --url, CHECKPOINT and workload options")
    if no_cache and (against or vllm is not None):
        raise click.UsageError("--no-cache compares quantkit's engine with itself; leave out --engine and --against")
    if no_cache:
        _bench_no_cache(output_to, engine, checkpoint, workload)
        return
    if "rates" in workload:
        workload.setdefault("concurrencies", ())  # with --rate alone, measure no closed loops
    if url:
        _bench_server(output_to, url, checkpoint, BenchmarkOptions(**workload))
        return
    if against:  # a ratio says nothing without the spread of its rounds
        workload.setdefault("rounds", ROUNDS_AGAINST)
    options = BenchmarkOptions(static=batching == "static", **workload)
    _bench_models(output_to, engine, vllm, [checkpoint, against] if against else [checkpoint], options)


def _bench_models(
    output_to: Output,
    engine: dict[str, Any],
    vllm: dict[str, Any] | None,
    models: list[str | None],
    options: BenchmarkOptions,
) -> None:
    """Benchmark one model or two: in turns in quantkit's engine, or one after the other in vLLM."""
    from quantkit.benchmark.compare import compare_results
    from quantkit.benchmark.run import measure_served

    details: list[Table | None] = []
    if vllm is None:
        results, known, details = _measure(output_to, engine, models, options)
    else:
        results = [measure_served(model, options, vllm, engine, output_to.tell) for model in models]
        known = [{}] * len(results)
    numbers = [
        {"benchmark": result.to_dict(), "summary": _summaries(result.runs), **extra}
        for result, extra in zip(results, known, strict=True)
    ]
    if len(results) == 2:
        ratios = compare_results(*results)
        rows = [{**asdict(ratio), "ratio": ratio.ratio} for ratio in ratios]
        numbers[0] |= {"against": numbers[1], "ratios": rows}
        details.insert(0, show.ratio_table(ratios, results[1].model))
    output_to.result(numbers[0], show.settings_lines(results), *_speed(show.labelled_runs(results)), *details)


def _measure(
    output_to: Output, engine: dict[str, Any], models: list[str | None], options: BenchmarkOptions
) -> tuple[list[BenchmarkResult], list[dict[str, Any]], list[Table | None]]:
    """Measure the models in quantkit's engine. Return the results, further numbers of each model, and further tables of
    the first model.
    """
    from quantkit.benchmark import run as benchmark
    from quantkit.benchmark.ceilings import fit_itl, fit_ttft
    from quantkit.benchmark.diagnosis import diagnose

    for model in models:  # check all of them before the first is loaded
        benchmark.check_target(model, options, engine)
    output_to.tell("loading")
    targets = [benchmark.load_target(model, options, engine) for model in models]
    output_to.tell("measuring the ceilings (bandwidth and arithmetic rate) of this machine")
    ceilings = benchmark.find_ceilings(targets)
    results = benchmark.measure_targets(targets, options, ceilings, output_to.tell)
    fits = [{"ITL": fit_itl(result), "TTFT": fit_ttft(result)} for result in results]
    costs, others = (target.cost for target in targets), (*results[1:], None)
    diagnoses = list(map(diagnose, results, costs, others))
    known: list[dict[str, Any]] = [
        {
            "fits": {name: fit and asdict(fit) for name, fit in of_result.items()},
            "roofline": [_step(record) for record in result.roofline],
            "diagnosis": diagnosis.to_dict(),
        }
        for result, of_result, diagnosis in zip(results, fits, diagnoses, strict=True)
    ]
    known[0]["ceilings"] = asdict(ceilings)
    tables = [
        show.fit_table(fits[0].items()),
        show.memory_table(results[0]),
        show.roofline_table(("", record) for record in results[0].roofline),
        show.diagnosis_table(diagnoses[0]),
    ]
    return results, known, tables


def _step(r: RooflineRecord) -> dict[str, Any]:
    return {"phase": r.phase, "batch": r.batch, "mbu": r.mbu, "mfu": r.mfu, "floor_s": r.floor_s, "bound": r.bound_by}


def _bench_server(output_to: Output, url: str, checkpoint: str | None, options: BenchmarkOptions) -> None:
    """Benchmark a server, whatever engine it runs."""
    from quantkit.benchmark.http import COMMON_TOKENS, measure_server
    from quantkit.checkpoints.folder import resolve
    from quantkit.checkpoints.tokenizer import load_tokenizer
    from quantkit.server.client import Remote

    remote, vocab_size, avoid = Remote(url), COMMON_TOKENS, tuple(range(10))  # the first ids are often special
    if checkpoint is not None:
        tokenizer = load_tokenizer(resolve(checkpoint))
        vocab_size, avoid = len(tokenizer), tuple(tokenizer.all_special_ids)
    runs = measure_server(remote, options, vocab_size=vocab_size, avoid=avoid, progress=output_to.tell)
    known = {"url": remote.url, "model": remote.model, "runs": [run.to_dict() for run in runs]}
    output_to.result({**known, "summary": _summaries(runs)}, *_speed([(run.workload.name, run) for run in runs]))


def _bench_no_cache(output_to: Output, engine: dict[str, Any], model: str | None, workload: dict[str, Any]) -> None:
    """Time the same text with the cache and without it."""
    from quantkit.benchmark.memory_prediction import max_length
    from quantkit.benchmark.run import check_target, compare_cache, load_target
    from quantkit.benchmark.workload import make_load

    sizes = {name: workload[name] for name in ("prompt_tokens", "new_tokens", "seed") if name in workload}
    prompt_tokens = sizes.setdefault("prompt_tokens", NO_CACHE_PROMPT)
    longest = engine.get("max_length") or max_length(model) or NO_CACHE_TOKENS
    new_tokens = sizes.setdefault("new_tokens", max(1, min(NO_CACHE_TOKENS, longest - prompt_tokens)))
    options = BenchmarkOptions(concurrencies=(1,), num_requests=1, **sizes)
    check_target(model, options, engine)
    output_to.tell("loading")
    target = load_target(model, options, engine)
    load = make_load(options.workloads()[0], target.llm.model.vocab_size, avoid=target.llm.model.eos_ids)
    every = max(1, new_tokens // 10)
    comparison = compare_cache(
        target.llm,
        load.prompts[-1],
        new_tokens,
        lambda done: output_to.tell(f"recomputing: token {done} of {new_tokens}") if done % every == 0 else None,
    )
    data = {
        "cached": comparison.cached.to_dict(),
        "recomputed": comparison.recomputed.to_dict(),
        "num_same_tokens": comparison.num_same,
        "marks": [mark._asdict() for mark in comparison.marks()],
    }
    output_to.result(data, show.cache_table(comparison))


def _speed(runs: Sequence[tuple[str, BenchmarkRun]]) -> tuple[Table | None, Table | None]:
    return show.explained_latency_table(runs), show.throughput_table(runs)


def _summaries(runs: Iterable[BenchmarkRun]) -> dict[str, dict[str, Any]]:
    """Return the percentiles and rates of each run."""
    from quantkit.results.statistics.summary import quantiles

    summaries = {}
    for run in runs:
        summaries[run.workload.name] = {
            **{f"{name.lower()}_s": quantiles(values) for name, values in run.latencies.items()},
            "tokens_per_s": run.output_tokens_per_s,
            "requests_per_s": run.requests_per_s,
            "goodput_per_s": run.goodput_per_s,
        }
    return summaries
