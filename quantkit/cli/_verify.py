"""What `verify` and `quantize --verify` share: options, the run, and what users see of it."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from quantkit.compress.recipe import Recipe
    from quantkit.evaluate.verify import Pair, VerifyOptions
    from quantkit.results import CompressionResult, FidelityResult, Report

GATE_HELP = "What must hold, e.g. 'recovery>=98.9'; repeatable.  [default: the recipe's]"


MISSING = "-"
FIDELITY = {
    "mean KL, nats per token": "mean_kl",
    "99th percentile of KL": "p99_kl",
    "same likeliest token": "top1_agreement",
}


def gate_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add --gate, which arrives as `gates`: None where it was not given."""

    @click.option("--gate", "gates", multiple=True, metavar="GATE", help=GATE_HELP)
    @functools.wraps(function)
    def command(*args: Any, gates: tuple[str, ...], **options: Any) -> None:
        function(*args, gates=gates or None, **options)

    return command


def evaluation_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say what both models are asked; they arrive together as `asked`."""

    @click.option(
        "--suite",
        default="quick",
        show_default=True,
        metavar="NAME|FILE",
        help="Set of tasks: quick, standard, long-context or none.",
    )
    @click.option("--tasks", metavar="A,B", help="Further tasks by name.")
    @click.option("--limit", type=click.IntRange(min=1), help="Items of each task, at most.  [default: the suite's]")
    @click.option("--text", metavar="FILE", help="Text that both models' distributions are compared on.")
    @click.option("--data", multiple=True, metavar="DIR", help="Folder of items and texts on disk; repeatable.")
    @click.option(
        "--include-path", multiple=True, metavar="DIR", help="Folder of further lm-eval task files; repeatable."
    )
    @click.option("--seed", type=click.IntRange(min=0), help="Seed of everything random.")
    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> None:
        names = ("suite", "tasks", "limit", "text", "data", "include_path", "seed")
        asked = {name: options.pop(name) for name in names}
        function(*args, asked=asked, **options)

    return command


def make_options(
    asked: Mapping[str, Any], engine: Mapping[str, Any], *, bench: bool = True, sensitivity: bool | None = None
) -> VerifyOptions:
    """What to look at, from the options of a command."""
    from quantkit.evaluate.run import EvaluationOptions
    from quantkit.evaluate.verify.run import BENCH, VerifyOptions

    evaluation = EvaluationOptions(
        suite=None if asked["suite"] == "none" else asked["suite"],
        tasks=tuple(filter(None, (asked["tasks"] or "").split(","))),
        limit=asked["limit"],
        texts=(asked["text"],) if asked["text"] else (),
        data=tuple(map(Path, asked["data"])),
        include_path=tuple(map(Path, asked["include_path"])),
        seed=asked["seed"],
    )
    return VerifyOptions(
        evaluation=evaluation,
        text=asked["text"],
        bench=BENCH if bench else None,
        sensitivity=sensitivity,
        engine={name: value for name, value in engine.items() if value is not None},
        command=shlex.join(["quantkit", *sys.argv[1:]]),
    )


def run(output_to: Output, pair: Pair, options: VerifyOptions) -> Report:
    """Verify, telling progress."""
    from quantkit.evaluate.verify import verify

    quiet: Callable[[str], None] = lambda _: None  # noqa: E731
    tell: Callable[[str], None] = lambda text: click.echo(text, err=True)  # noqa: E731
    return verify(pair, options, progress=tell if output_to.shows_progress else quiet)


def finish(
    output_to: Output, report: Report, files: Mapping[str, Path], problem: str, more: Mapping[str, Any] | None = None
) -> None:
    """Print a report and end with the exit code that it deserves.

    Args:
        output_to: how.
        report: judged.
        files: that were written, by kind.
        problem: why some were not; empty when all were.
        more: further entries of the JSON object.
    Raises:
        GateFailure: a gate did not hold; with --json the exit code alone says so.
    """
    from quantkit.errors import GateFailure

    if problem and output_to.shows_progress:
        click.echo(f"warning: {problem}", err=True)
    output_to.result(lambda: {**(more or {}), **numbers(report, files)}, *shown(report, files))
    if report.held:
        return
    if output_to.as_json:
        click.get_current_context().exit(GateFailure.exit_code)
    raise GateFailure(failure(report))


def failure(report: Report) -> str:
    """Which gates failed, by how much, and the nearest remedy, in one line."""
    from quantkit.report.words import remedies

    failed = [f"{gate.gate} ({gate.explanation})" for gate in report.gates if not gate.held]
    todo = next(iter(remedies([gate for gate in report.gates if not gate.held])), "")
    return f"{len(failed)} of {len(report.gates)} gates did not hold: {'; '.join(failed)}. Nearest remedy: {todo}"


def numbers(report: Report, files: Mapping[str, Path]) -> dict[str, Any]:
    """What --json prints of a report; all of it is in report.json."""
    from quantkit.report.json import finite
    from quantkit.results.gates import measure

    proposal = report.sensitivity.proposal if report.sensitivity is not None else None
    found: dict[str, Any] = finite(
        {
            "held": report.held,
            "gates": [gate.to_dict() for gate in report.gates],
            "metrics": measure(report),
            "proposal": None if proposal is None else proposal.to_dict(),
            "notes": list(report.notes),
            "files": {kind: str(path) for kind, path in files.items()},
        }
    )
    return found


def shown(report: Report, files: Mapping[str, Path]) -> list[Callable[[], RenderableType]]:
    """What people see, the verdict first."""
    from quantkit.report.words import gate_lines, headline

    parts: list[Callable[[], RenderableType]] = [lambda: headline(report)]
    if report.gates:
        parts.append(lambda: "\n".join(gate_lines(report.gates)))
    parts += [lambda: accuracy_table(report), lambda: fidelity_table(report)]
    if report.sensitivity is not None:
        parts.append(lambda: sensitivity_table(report))
    if report.benchmark is not None:
        parts.append(lambda: speed_table(report))
    where = sorted({str(path.parent) for path in files.values()})
    names = ", ".join(path.name for path in files.values())
    parts.append(lambda: "\n".join([*report.notes, f"written to {', '.join(where)}: {names}"]))
    return parts


def accuracy_table(report: Report) -> Table:
    """Every number that both models have."""
    from quantkit.report.words import number, p_value, percent

    rows = []
    for c in report.comparisons:
        recovery = MISSING if c.recovery is None else percent(c.recovery)
        rows.append((c.subject, number(c.baseline, 4), number(c.value, 4), recovery, p_value(c.p_value), c.verdict))
    return _table("model beside original, same items", ("", "original", "model", "recovery", "p", "verdict"), rows)


def fidelity_table(report: Report) -> Table:
    """Distances of the distributions, and what arithmetic alone does."""
    from quantkit.report.words import number

    found, noise = report.fidelity, report.noise_fidelity
    rows = []
    for name, read in FIDELITY.items():
        own = MISSING if noise is None else number(getattr(noise, read))
        rows.append((name, MISSING if found is None else number(getattr(found, read)), own))
    if found is not None and found.first_divergence:
        rows.append(
            (
                "greedy prompts that agree throughout",
                _throughout(found),
                MISSING if noise is None else _throughout(noise),
            )
        )
    title = "distributions" if found is None else f"distributions on {found.data}, {found.num_tokens:,} tokens"
    return _table(title, ("", "model", "noise"), rows)


def _throughout(found: FidelityResult) -> str:
    agreed = sum(first is None for first in found.first_divergence)
    return f"{agreed} of {len(found.first_divergence)}"


def sensitivity_table(report: Report) -> Table:
    """The units that hurt most."""
    from quantkit.report.words import number, percent

    sensitivity = report.sensitivity
    assert sensitivity is not None
    total = sensitivity.sum_kl or 1.0
    rows = [(f"layer {r.layer} {r.unit}", number(r.kl), percent(100 * r.kl / total)) for r in sensitivity.worst(5)]
    title = f"worst units, each alone; all at once {number(sensitivity.total_kl)}, sum {number(sensitivity.sum_kl)}"
    return _table(title, ("", "KL", "share"), rows)


def speed_table(report: Report) -> Table:
    """Medians of both models, and their weights in memory."""
    from quantkit.report.words import byte_size, duration, number
    from quantkit.results.statistics import median_interval

    ours, theirs = report.benchmark, report.baseline_benchmark
    assert ours is not None and theirs is not None
    rows = []
    for run in ours.runs:
        other = theirs.find_run(run.workload.name)
        if run.workload.concurrency is None or run.workload.name == "sweep" or other is None:
            continue
        for name, read in (("TTFT", "ttft_s"), ("ITL", "inter_token_s")):
            values = [duration(median_interval(getattr(side, read))[0]) for side in (other, run)]
            rows.append((f"{run.workload.name} {name}", *values))
        rows.append((f"{run.workload.name} tokens/s", *(number(side.output_tokens_per_s) for side in (other, run))))
    sizes = [side.memory_part("weights") for side in (theirs, ours)]
    rows.append(("weights in memory", *(byte_size(part.observed_bytes if part else None) for part in sizes)))
    return _table("speed and memory, medians, measured in turns", ("", "original", "model"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table

    found = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0))
    for position, name in enumerate(columns):
        numeric = position > 0 and name != "verdict"
        found.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in rows:
        found.add_row(*row)
    return found


def check_before(recipe: Recipe, gates: tuple[str, ...] | None) -> None:
    """Before compressing: what verification would refuse afterwards.

    Raises:
        QuantkitError: the format cannot be run, a gate cannot be read, or a package is missing.
    """
    from quantkit.errors import RecipeError
    from quantkit.evaluate.verify import VerifyOptions, check, check_gates

    if recipe.format == "gguf":
        raise RecipeError(
            "a GGUF file is not run by quantkit, so --verify cannot prove it; verify the same recipe as "
            "compressed-tensors and convert that with `quantkit convert --to gguf`"
        )
    check_gates(recipe.gates if gates is None else gates)
    check(VerifyOptions())


def prove(
    output_to: Output,
    result: CompressionResult,
    model: str | None,
    gates: tuple[str, ...] | None,
    device: str,
    summary: Callable[[], RenderableType],
) -> None:
    """After compressing: verify the checkpoint, and give it another name when it fails.

    Raises:
        GateFailure: it failed.
    """
    from quantkit.demo import DEMO_MODEL
    from quantkit.evaluate.verify import check_pair, set_aside, write
    from quantkit.results import to_dict

    defaults = {
        "suite": "quick",
        "tasks": None,
        "limit": None,
        "text": None,
        "data": (),
        "include_path": (),
        "seed": None,
    }
    path = Path(result.output)
    pair = check_pair(path, DEMO_MODEL if model is None else model, gates)
    report = run(output_to, pair, make_options(defaults, {"device": device}))
    if not report.held:
        report, path = set_aside(report, path)
        if output_to.shows_progress:
            click.echo(f"the checkpoint failed and is kept as {path}", err=True)
    files, problem = write(report, path)
    if not output_to.as_json:
        output_to.result(dict, summary, lambda: "")
    finish(output_to, report, files, problem, {**to_dict(result), "output": str(path)})
