"""`quantkit verify`: compare a checkpoint with its original and check gates; also `quantize --verify`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import engine_choice, option_group, ranks_option, runtime_options, settings_of
from quantkit.cli._output import Command, Output
from quantkit.evaluate.options import EvaluationOptions
from quantkit.quantities import counted, parse_tokens
from quantkit.report.table import Table

if TYPE_CHECKING:
    from quantkit.compress.recipe import Recipe
    from quantkit.evaluate.verify.options import VerifyOptions
    from quantkit.results import CompressionResult, Report

ASKED = ("suite", "tasks", "limit", "data", "include_path", "text_tokens", "behaviour", "prompts", "seed")

gate_option = click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="GATE",
    # None, not an empty tuple: without --gate, the recipe's gates apply.
    callback=lambda _ctx, _option, gates: gates or None,
    help="Gate that must hold, e.g. 'recovery>=98.9'; repeatable.  [default: the recipe's gates]",
)

sensitivity_option = click.option(
    "--sensitivity/--no-sensitivity",
    default=None,
    help="Measure how sensitive each part of the model is.  [default: only if an accuracy gate fails]",
)

drift_option = click.option(
    "--drift",
    metavar="TOKENS",
    callback=lambda _ctx, _option, text: None if text is None else parse_tokens(text, "--drift"),
    help="Compare the distributions of both models while decoding this many tokens, e.g. 2k.  [default: off]",
)


def verify_options(
    asked: Mapping[str, Any], engine: Mapping[str, Any], *, text: str | None = None, bench: bool = True, **what: Any
) -> VerifyOptions:
    """Build the options of a verification from the options of a command.

    Args:
        asked: fields of `EvaluationOptions`.
        engine: keywords of `LLM`.
        text: file or name of the text on which distributions are compared.
        bench: whether to time both models.
        what: further fields of `VerifyOptions`.
    """
    from quantkit.evaluate.verify.options import BENCH, VerifyOptions

    return VerifyOptions(
        evaluation=EvaluationOptions(**{"suite": "quick", "texts": (text,) if text else (), **asked}),
        text=text,
        bench=BENCH if bench else None,
        engine=engine,
        # Quoted, so that the command can be pasted into a shell.
        command=shlex.join(["quantkit", *sys.argv[1:]]),
        **what,
    )


def report_folder(checkpoint: Path) -> Path:
    """Return the default folder of a report: the checkpoint, or a folder beside a GGUF file."""
    return checkpoint if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.stem}-report")


def finish(
    output_to: Output, report: Report, files: Mapping[str, Path], problem: str, entries: Mapping[str, Any] | None = None
) -> None:
    """Print a report, and raise an error if a gate did not hold.

    Args:
        output_to: where to print.
        report: report with checked gates.
        files: files that were written, keyed by kind.
        problem: reason why a file is missing; empty if all were written.
        entries: further entries of the JSON object.
    Raises:
        GateFailure: a gate did not hold. With --json, only the exit code reports it.
    """
    from quantkit.report.files import json_ready, report_tables
    from quantkit.report.tables import gate_lines, headline
    from quantkit.results.gates import gate_numbers

    if problem:
        output_to.tell(f"warning: {problem}")
    proposal = report.sensitivity and report.sensitivity.proposal
    numbers = {
        "held": report.held,
        "gates": json_ready([gate.to_dict() for gate in report.gates]),
        "metrics": json_ready(gate_numbers(report)),
        "proposal": json_ready(proposal and proposal.to_dict()),
        "notes": list(report.notes),
        "files": {kind: str(path) for kind, path in files.items()},
    }
    folders = ", ".join(sorted({str(path.parent) for path in files.values()}))
    written = f"written to {folders}: {', '.join(path.name for path in files.values())}"
    gates = "\n".join(gate_lines(report.gates)) or None
    # The report has the same tables.
    shown = headline(report), gates, *report_tables(report), "\n".join([*report.notes, written])
    output_to.result({**(entries or {}), **numbers}, *shown)
    output_to.require(report.held, failure(report))


def failure(report: Report) -> str:
    """Describe the failed gates, by how much they failed, and the most promising remedy, in one line."""
    from quantkit.report.tables import remedies

    failed = [f"{gate.gate} ({gate.explanation})" for gate in report.gates if not gate.held]
    todo = next(iter(remedies(report.gates)), "")
    total = counted(len(report.gates), "gate")
    return f"{len(failed)} of {total} did not hold: {'; '.join(failed)}. Suggested change: {todo}"


def check_before(recipe: Recipe, gates: tuple[str, ...] | None) -> None:
    """Check, before compressing, that the result can be verified.

    Raises:
        QuantkitError: the engine cannot run the format, a gate is not valid, or a package is missing.
    """
    from quantkit.errors import RecipeError
    from quantkit.evaluate.verify.options import VerifyOptions, check_options
    from quantkit.evaluate.verify.pair_checks import check_gates
    from quantkit.formats import REGISTRY as FORMATS

    if FORMATS.load(recipe.format).suffix:
        raise RecipeError(
            f"--verify cannot run a {recipe.format} file; use --format compressed-tensors with --verify, and convert "
            f"the checkpoint with `quantkit convert --to {recipe.format}`"
        )
    check_gates(recipe.gates if gates is None else gates)
    check_options(VerifyOptions())


def verify_result(
    output_to: Output,
    result: CompressionResult,
    model: str | None,
    gates: tuple[str, ...] | None,
    how: Mapping[str, Any],
    summary: Table,
) -> None:
    """Verify a new checkpoint, and rename it if a gate fails.

    Raises:
        GateFailure: a gate failed.
    """
    from quantkit.evaluate.verify.pair_checks import check_pair, set_aside
    from quantkit.evaluate.verify.run import verify_pair
    from quantkit.report.files import write_report

    path = Path(result.output)
    pair = check_pair(path, model, gates)
    options = verify_options({}, {name: value for name, value in how.items() if name == "device"})
    report = verify_pair(pair, options, progress=output_to.tell, keep=lambda early: write_report(early, path))
    if not report.held:
        # Renamed first, so that the report is written into the checkpoint that it is about.
        report, path = set_aside(report, path)
        output_to.tell(f"the checkpoint failed verification and was renamed to {path}")
    files, problem = write_report(report, path)
    if not output_to.as_json:  # with --json, `finish` prints one object for both
        output_to.result({}, summary, "")
    finish(output_to, report, files, problem, {**result.to_dict(), "output": str(path)})


@click.command("verify", cls=Command, short_help="Verify a checkpoint: accuracy, fidelity, speed and gates.")
@click.argument("checkpoint")
@click.option("--baseline", metavar="MODEL", help="The original model.  [default: CHECKPOINT's original]")
@click.option("-o", "--output", metavar="DIR", help="Folder for the report.  [default: CHECKPOINT or FILE-report]")
@click.option("--bench/--no-bench", default=True, show_default=True, help="Time both models.")
@sensitivity_option
@drift_option
@click.option("--text", metavar="FILE", help="Text on which the distributions of both models are compared.")
@gate_option
@option_group("asked", settings_of(EvaluationOptions, *ASKED))
@runtime_options
@engine_choice
@ranks_option
def command(
    output_to: Output,
    *,
    checkpoint: str,
    baseline: str | None,
    output: str | None,
    gates: tuple[str, ...] | None,
    **what: Any,
) -> None:
    """Read CHECKPOINT back from disk, compare it with its original, and check gates. A failed gate sets exit code 3.

    Writes report.json, report.html, junit.xml and README.md, the model card. With --adapter, both models use the
    adapter. If it was merged into CHECKPOINT, quantkit also merges it into the original, from --adapter's folder.

    \b
    Gates: recovery, recovery[TASK], score[TASK], perplexity, perplexity_ratio,
      kl, kl_p99, top1, drift, length_ratio, margin[DECISION], flips,
      loop_rate, unended, right_format, valid_calls, ttft_ratio, itl_ratio,
      tpot_ratio, throughput_ratio, memory_ratio, size_ratio, bits_per_weight,
      acceptance_ratio.

    \b
    Examples:
      quantkit verify demo-awq-int4
      quantkit verify demo-awq-int4 --gate "recovery>=98.9" --gate "kl<=0.05"
      quantkit verify demo-awq-int4 --kv-cache int8 --no-bench -o int8-cache
      quantkit verify demo-awq-int4 --kv-cache int4 --drift 400
      quantkit verify demo-awq-int4 --engine vllm
      quantkit verify demo-awq-int4 --sensitivity --suite none --gate "kl<=0.01"
    """
    from quantkit.distributed import is_writer
    from quantkit.evaluate.verify.options import check_options
    from quantkit.evaluate.verify.pair_checks import check_output, check_pair
    from quantkit.evaluate.verify.run import verify_pair
    from quantkit.report.files import write_report

    options = verify_options(**what)
    check_options(options)
    pair = check_pair(checkpoint, baseline, gates, adapters=options.engine.get("adapters", ()))
    check_output(folder := report_folder(pair.path) if output is None else Path(output))

    def write(report: Report) -> tuple[dict[str, Path], str]:
        return write_report(report, folder) if is_writer() else ({}, "")

    report = verify_pair(pair, options, progress=output_to.tell, keep=write)
    finish(output_to, report, *write(report))
