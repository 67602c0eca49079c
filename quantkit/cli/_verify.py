"""What `verify` and `quantize --verify` share: options, the run, and what users see of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._output import Output
from quantkit.report.table import Table

if TYPE_CHECKING:
    from quantkit.compress.recipe import Recipe
    from quantkit.evaluate.verify.run import VerifyOptions
    from quantkit.results import CompressionResult, Report

gate_option = click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="GATE",
    # None, not an empty tuple: without --gate those of the recipe count.
    callback=lambda _ctx, _option, gates: gates or None,
    help="What must hold, e.g. 'recovery>=98.9'; repeatable.  [default: the recipe's]",
)


def verify_options(
    asked: Mapping[str, Any], engine: Mapping[str, Any], *, text: str | None = None, bench: bool = True, **what: Any
) -> VerifyOptions:
    """What to verify, from the options of a command.

    Args:
        asked: fields of `EvaluationOptions`.
        engine: keywords of `LLM`.
        text: that distributions are compared on.
        bench: whether both models are timed.
        what: further fields of `VerifyOptions`.
    """
    from quantkit.evaluate.options import EvaluationOptions
    from quantkit.evaluate.verify.run import BENCH, VerifyOptions

    return VerifyOptions(
        evaluation=EvaluationOptions(**{"suite": "quick", "texts": (text,) if text else (), **asked}),
        text=text,
        bench=BENCH if bench else None,
        engine=engine,
        # Quoted, so that it can be pasted into a shell again.
        command=shlex.join(["quantkit", *sys.argv[1:]]),
        **what,
    )


def finish(
    output_to: Output, report: Report, files: Mapping[str, Path], problem: str, entries: Mapping[str, Any] | None = None
) -> None:
    """Print a report and end with the exit code that it deserves.

    Args:
        output_to: how.
        report: judged.
        files: that were written, by kind.
        problem: why some were not; empty when all were.
        entries: of the JSON object, besides those about the report.
    Raises:
        GateFailure: a gate did not hold; with --json the exit code alone says so.
    """
    if problem:
        output_to.tell(f"warning: {problem}")
    output_to.result(lambda: {**(entries or {}), **report_numbers(report, files)}, *shown(report, files))
    output_to.require(report.held, lambda: failure(report))


def failure(report: Report) -> str:
    """Which gates failed, by how much, and the nearest remedy, in one line."""
    from quantkit.report.tables import remedies

    failed = [f"{gate.gate} ({gate.explanation})" for gate in report.gates if not gate.held]
    todo = next(iter(remedies([gate for gate in report.gates if not gate.held])), "")
    return f"{len(failed)} of {len(report.gates)} gates did not hold: {'; '.join(failed)}. Nearest remedy: {todo}"


def report_numbers(report: Report, files: Mapping[str, Path]) -> dict[str, Any]:
    """What --json prints of a report; all of it is in report.json."""
    from quantkit.report.files import json_ready
    from quantkit.results.gates import gate_numbers

    proposal = report.sensitivity and report.sensitivity.proposal
    return {
        "held": report.held,
        "gates": json_ready([gate.to_dict() for gate in report.gates]),
        "metrics": json_ready(gate_numbers(report)),
        "proposal": json_ready(proposal and proposal.to_dict()),
        "notes": list(report.notes),
        "files": {kind: str(path) for kind, path in files.items()},
    }


def shown(report: Report, files: Mapping[str, Path]) -> list[Callable[[], Table | str | None]]:
    """What people see, the verdict first; the tables are those of the report."""
    from quantkit.report import speed_tables, tables
    from quantkit.report.tables import gate_lines, headline

    runs = list(speed_tables.report_runs(report))
    folders = sorted({str(path.parent) for path in files.values()})
    names = ", ".join(path.name for path in files.values())
    return [
        lambda: headline(report),
        lambda: "\n".join(gate_lines(report.gates)) or None,
        lambda: tables.comparison_table(report.comparisons),
        lambda: tables.fidelity_table(report.fidelity, report.noise_fidelity),
        lambda: tables.worst_groups_table(report.sensitivity) if report.sensitivity else None,
        lambda: speed_tables.latency_table(runs),
        lambda: speed_tables.throughput_table(runs),
        lambda: speed_tables.memory_table(report.benchmark, report.baseline_benchmark),
        lambda: "\n".join([*report.notes, f"written to {', '.join(folders)}: {names}"]),
    ]


def check_before(recipe: Recipe, gates: tuple[str, ...] | None) -> None:
    """Before compressing: what verification would refuse afterwards.

    Raises:
        QuantkitError: the format cannot be run, a gate cannot be read, or a package is missing.
    """
    from quantkit.errors import RecipeError
    from quantkit.evaluate.verify.pair import check_gates
    from quantkit.evaluate.verify.run import VerifyOptions, check_options
    from quantkit.formats import REGISTRY as FORMATS

    if FORMATS.load(recipe.format).suffix:
        raise RecipeError(
            f"a {recipe.format} file is not run by quantkit, so --verify cannot run it; verify the same recipe as "
            f"compressed-tensors and convert that with `quantkit convert --to {recipe.format}`"
        )
    check_gates(recipe.gates if gates is None else gates)
    check_options(VerifyOptions())


def verify_result(
    output_to: Output,
    result: CompressionResult,
    model: str | None,
    gates: tuple[str, ...] | None,
    how: Mapping[str, Any],
    summary: Callable[[], Table],
) -> None:
    """After compressing: verify the checkpoint, and give it another name when it fails.

    Raises:
        GateFailure: it failed.
    """
    from quantkit.evaluate.verify.pair import check_pair, set_aside, write_files
    from quantkit.evaluate.verify.run import verify_pair

    path = Path(result.output)
    pair = check_pair(path, model, gates)
    options = verify_options({}, {name: value for name, value in how.items() if name == "device"})
    report = verify_pair(pair, options, progress=output_to.tell)
    if not report.held:
        # Renamed first, so that the report is written into the checkpoint that it is about.
        report, path = set_aside(report, path)
        output_to.tell(f"the checkpoint failed and is kept as {path}")
    files, problem = write_files(report, path)
    if not output_to.as_json:  # there it is one object, together with the report's
        output_to.result(dict, summary, lambda: "")
    finish(output_to, report, files, problem, {**result.to_dict(), "output": str(path)})
