"""`quantkit bench`: latency, throughput and memory of a checkpoint, and what binds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import _bench as show
from quantkit.cli._options import option_group
from quantkit.cli._output import Output, output_options
from quantkit.cli._runtime import numbers, runtime_options

if TYPE_CHECKING:
    from quantkit.benchmark.ceilings import Ceilings
    from quantkit.benchmark.run import BenchmarkTarget
    from quantkit.results import BenchmarkResult

NO_CACHE_TOKENS, NO_CACHE_PROMPT = 1000, 16
DEFAULT_PROMPT, DEFAULT_NEW = 256, 128
ROUNDS_AGAINST = 4

EPILOG = f"""\b
{show.DEFINITIONS}
MBU, MFU: share of the memory bandwidth, and of the rate of a large matrix
product, both measured in the same run.

\b
Examples:
  quantkit bench
  quantkit bench demo-awq-int4 --batch 1,8,32 --prompt-tokens 512
  quantkit bench demo-awq-int4 --against quantkit/demo/model
  quantkit bench --rate 4 --requests 40 --ttft-limit 0.5 --tpot-limit 0.05
  quantkit bench --no-cache
"""


_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)
_workload_options = option_group(
    "workload",
    click.option(
        "--batch",
        metavar="N,...",
        callback=numbers(int, "numbers"),
        help="Requests in flight at once.  [default: 1,8]",
    ),
    click.option(
        "--rate", metavar="R,...", callback=numbers(float, "rates"), help="Requests per second, as Poisson arrivals."
    ),
    click.option("--prompt-tokens", type=_COUNT, help=f"Tokens in each prompt.  [default: {DEFAULT_PROMPT}]"),
    click.option("--new-tokens", type=_COUNT, help=f"Tokens made for each request.  [default: {DEFAULT_NEW}]"),
    click.option(
        "--requests", "num_requests", type=_COUNT, help="Requests in each run.  [default: 2 x batch, at least 4]"
    ),
    click.option(
        "--spread",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        help="Spread of lengths: 0.8 draws them from 20 to 100 %.",
    ),
    click.option("--batching", type=click.Choice(["static"]), help="Also measure static batches, for comparison."),
    click.option(
        "--rounds", type=_COUNT, help=f"Repetitions of every run.  [default: 1; {ROUNDS_AGAINST} with --against]"
    ),
    click.option(
        "--ttft-limit",
        "ttft_limit_s",
        type=_SECONDS,
        metavar="SECONDS",
        help="Longest TTFT of a request that counts as goodput.",
    ),
    click.option(
        "--tpot-limit",
        "tpot_limit_s",
        type=_SECONDS,
        metavar="SECONDS",
        help="Longest TPOT of a request that counts as goodput.",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of prompts and arrivals."
    ),
)
"""Options that say what is sent."""


@click.command("bench", epilog=EPILOG, short_help="TTFT, ITL, throughput, memory; what binds and what to try.")
@click.argument("checkpoint", required=False)
@click.option("--against", metavar="MODEL", help="Measure this one in turns with CHECKPOINT, and compare.")
@click.option("--no-cache", is_flag=True, help="Compare with recomputing the whole context for every token; slow.")
@output_options
@runtime_options
@_workload_options
def bench(
    output_to: Output,
    engine: dict[str, Any],
    *,
    checkpoint: str | None,
    against: str | None,
    no_cache: bool,
    workload: dict[str, Any],
) -> None:
    """Measure CHECKPOINT, a directory or a hub id; without it, the bundled demo model.

    Prompts are random tokens; every request runs to its full length. Nothing else should run on the machine meanwhile.
    """
    if no_cache and against:
        raise click.UsageError("--no-cache compares a model with itself: leave --against out")
    if no_cache:
        _bench_no_cache(output_to, engine, checkpoint, workload)
        return
    from quantkit.benchmark import run as benchmark

    options = benchmark.BenchmarkOptions(**_options(workload, against is not None))
    models = [checkpoint, against] if against else [checkpoint]
    for model in models:  # all of them before the first is loaded
        benchmark.check_target(model, options, engine)
    progress = _progress(output_to)
    progress("loading")
    targets = [benchmark.load_target(model, options, engine) for model in models]
    progress("measuring the ceilings of this machine")
    ceilings = benchmark.find_ceilings(targets)
    if against:
        results = list(benchmark.measure_against(targets[0], targets[1], options, ceilings, progress))
    else:
        results = [benchmark.measure_model(targets[0], options, ceilings, progress)]
    _report(output_to, targets, results, ceilings)


def _options(workload: dict[str, Any], compares: bool) -> dict[str, Any]:
    """Keywords of `BenchmarkOptions`: what was left out gets its default."""
    given = dict(workload)
    batch, rate, rounds, batching = (given.pop(name) for name in ("batch", "rate", "rounds", "batching"))
    return {
        **given,
        "concurrencies": batch or (() if rate else (1, 8)),
        "rates": rate or (),
        "prompt_tokens": given["prompt_tokens"] or DEFAULT_PROMPT,
        "new_tokens": given["new_tokens"] or DEFAULT_NEW,
        "static": batching == "static",
        "rounds": rounds or (ROUNDS_AGAINST if compares else 1),
    }


def _report(
    output_to: Output, targets: list[BenchmarkTarget], results: list[BenchmarkResult], ceilings: Ceilings
) -> None:
    from dataclasses import asdict, replace

    from quantkit.benchmark.compare import compare_results
    from quantkit.benchmark.diagnosis import diagnose, diagnose_against
    from quantkit.benchmark.steps import fit_itl, fit_ttft

    fits = [{"ITL": fit_itl(result), "TTFT": fit_ttft(result)} for result in results]
    diagnoses = [diagnose(result, target.cost) for result, target in zip(results, targets, strict=True)]
    versus = results[1] if len(results) == 2 else None
    ratios = [] if versus is None else compare_results(results[0], versus)
    if versus is not None:
        compared = diagnose_against(results[0], versus).findings
        diagnoses[0] = replace(diagnoses[0], findings=(*compared, *diagnoses[0].findings))

    def data() -> dict[str, Any]:
        numbers = [show.numbers(*parts) for parts in zip(results, fits, diagnoses, strict=True)]
        rows = [{**asdict(ratio), "ratio": ratio.ratio} for ratio in ratios]
        other = {"against": numbers[1], "ratios": rows} if versus is not None else {}
        return {**numbers[0], "ceilings": asdict(ceilings), **other}

    from quantkit.report.speed_tables import memory_table, roofline_table, throughput_table

    runs = show.labelled_runs(results)
    output_to.result(
        data,
        lambda: show.settings_lines(results),
        lambda: show.latency_table(runs),
        lambda: throughput_table(runs),
        lambda: None if versus is None else show.ratio_table(ratios, versus.model),
        lambda: show.fit_lines(fits[0]),
        lambda: memory_table(results[0]),
        lambda: roofline_table(("", record) for record in results[0].roofline),
        lambda: show.diagnosis_table(diagnoses[0]),
    )


def _bench_no_cache(output_to: Output, engine: dict[str, Any], model: str | None, workload: dict[str, Any]) -> None:
    """The same text with the cache and without."""
    from quantkit.benchmark.no_cache import compare_cache
    from quantkit.benchmark.predict import max_length
    from quantkit.benchmark.run import BenchmarkOptions, check_target, load_target
    from quantkit.benchmark.workload import make_load

    prompt_tokens = workload["prompt_tokens"] or NO_CACHE_PROMPT
    room = engine["max_length"] or max_length(model)
    new_tokens = workload["new_tokens"] or max(1, min(NO_CACHE_TOKENS, (room or NO_CACHE_TOKENS) - prompt_tokens))
    options = BenchmarkOptions(
        concurrencies=(1,), prompt_tokens=prompt_tokens, new_tokens=new_tokens, num_requests=1, seed=workload["seed"]
    )
    check_target(model, options, engine)
    progress = _progress(output_to)
    progress("loading")
    target = load_target(model, options, engine)
    load = make_load(options.workloads()[0], target.llm.model.vocab_size, avoid=target.llm.model.eos_ids)
    every = max(1, new_tokens // 10)
    comparison = compare_cache(
        target.llm.engine,
        load.prompts[-1],
        new_tokens,
        lambda done: progress(f"recomputing: token {done} of {new_tokens}") if done % every == 0 else None,
    )
    output_to.result(lambda: show.cache_numbers(comparison), lambda: show.cache_table(comparison))


def _progress(output_to: Output) -> Callable[[str], None]:
    """Tells on stderr what is going on, if wanted."""
    return (lambda text: click.echo(text, err=True)) if output_to.shows_progress else (lambda _: None)


COMMAND = bench
