"""`quantkit tune`: which tiles the kernels run with on this GPU, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import Listed, number
from quantkit.cli._output import Output, output_options
from quantkit.runtime.config import KV_TYPES

if TYPE_CHECKING:
    from quantkit.benchmark.tune import CaseReport, Outcome, Tuning
    from quantkit.benchmark.tune_device import TunedFile
    from quantkit.report.table import Table

EPILOG = """\b
Examples:
  quantkit tune --list
  quantkit tune demo-awq-int4
  quantkit tune --shapes 8B --rows 1,16 --kv-cache auto,int8 --seconds 120
"""
SHAPES = ("1B", "8B", "70B")


def _kv_types(ctx: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """`auto,int8` as names; `none` is none of them."""
    names = () if text == "none" else tuple(text.split(","))
    for name in names:
        click.Choice(KV_TYPES).convert(name, option, ctx)
    return names


_OPTIONS = (
    click.option("--shapes", type=click.Choice(SHAPES), multiple=True, help="Layers of a Llama of that size."),
    click.option("--bits", type=click.Choice(["4", "8"]), default="4", show_default=True, help="Weights of --shapes."),
    click.option(
        "--group",
        type=click.IntRange(min=0),
        default=128,
        show_default=True,
        help="Group size of --shapes; 0 = a scale per output.",
    ),
    click.option("--asymmetric", is_flag=True, help="Weights of --shapes with zero points."),
    click.option(
        *("--rows", "rows"), metavar="N,...", default="1,4,16,64", show_default=True,
        type=Listed(number(int, minimum=1)), help="Rows of inputs.",
    ),
    click.option(
        "--batch", metavar="N,...", default="1,8,32", show_default=True, type=Listed(number(int, minimum=1)),
        help="Sequences of decode steps.",
    ),
    click.option("--context", type=click.IntRange(min=2), default=4000, show_default=True, help="Tokens per sequence."),
    click.option(
        "--kv-cache", metavar="TYPE,...|none", default="auto,fp8,int8,int4", show_default=True, callback=_kv_types,
        help="Number types of keys and values.",
    ),
    click.option(
        "--seconds", type=click.FloatRange(min=0, min_open=True), default=300, show_default=True,
        help="Stop after this long; the same command goes on.",
    ),
    click.option("--again", is_flag=True, help="Measure also what has been measured."),
    click.option(
        "-o", "--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
        help="File to write.  [default: in the cache folder, where kernels look]",
    ),
    click.option("--list", "listing", is_flag=True, help="Show which files are in force, and measure nothing."),
    click.option("--device", default="auto", show_default=True, metavar="auto|cuda[:i]", help="Which GPU."),
)  # fmt: skip


def _tune_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of this command, in the order of _OPTIONS."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("tune", epilog=EPILOG, short_help="Measure which tiles the kernels run fastest with on this GPU.")
@click.argument("model", required=False)
@_tune_options
@output_options
def tune(
    output_to: Output,
    *,
    model: str | None,
    bits: str,
    group: int,
    asymmetric: bool,
    batch: tuple[int, ...],
    kv_cache: tuple[str, ...],
    seconds: float,
    again: bool,
    output: Path | None,
    listing: bool,
    device: str,
    **others: Any,
) -> None:
    """Choose tiles for MODEL, a directory or a hub id, on a GPU of this machine; without it, for an 8B Llama in INT4.

    Of the checkpoint only headers are read. Whatever is chosen computes the same; a choice that is not more than 2 %
    faster than the default is not taken. Nothing else should run on the GPU meanwhile.
    """
    from quantkit.benchmark.tune_cases import TuneOptions
    from quantkit.benchmark.tune_device import find_files, tune_device

    if listing:
        files = find_files()
        output_to.result(lambda: {"files": [_file_document(file) for file in files]}, lambda: _files(files))
        return
    options = TuneOptions(
        model=model,
        bits=int(bits),
        group=group or None,
        symmetric=not asymmetric,
        batches=batch,
        kv_types=kv_cache,
        **others,
    )
    tuning = tune_device(
        options, device=device, seconds=seconds, again=again, output=output, report=_progress(output_to)
    )
    output_to.result(lambda: _document(tuning), lambda: _table(tuning), lambda: _summary(tuning))


def _progress(output_to: Output) -> CaseReport:
    def report(outcome: Outcome | None, number: int, total: int) -> None:
        if output_to.shows_progress and outcome is not None:
            click.echo(f"{number}/{total} {outcome.case.label}: {_told(outcome)}", err=True)

    return report


def _told(outcome: Outcome) -> str:
    entry = outcome.entry
    if entry is None:
        return outcome.problem
    gain = "the default stays" if entry.ratio == 1 else f"{entry.ratio:.2f} times as fast as the default"
    dropped = "".join(f", {count} {reason}" for reason, count in outcome.dropped.items())
    return f"{entry.microseconds:.1f} us, {gain} ({outcome.num_tried} candidates{dropped})"


def _table(tuning: Tuning) -> Table:
    from quantkit.report.table import Column, Table

    rows = []
    for outcome in tuning.outcomes:
        entry = outcome.entry
        measured: tuple[str | None, ...] = (outcome.problem, None, None)
        if entry is not None:
            measured = f"{entry.default_microseconds:.1f}", f"{entry.microseconds:.1f}", f"{entry.ratio:.2f}"
        rows.append((outcome.case.kernel, outcome.case.label, *measured))
    numbers = (Column(title, str) for title in ("default us", "tuned us", "ratio"))
    return Table(columns=(Column("kernel"), Column("shape"), *numbers), rows=tuple(rows))


def _summary(tuning: Tuning) -> str:
    from quantkit.quantities import elapsed

    done = len([outcome for outcome in tuning.outcomes if outcome.entry is not None])
    parts = [f"{done} measured in {elapsed(tuning.seconds)}"]
    if tuning.num_kept:
        parts.append(f"{tuning.num_kept} known before")
    if tuning.num_left:
        parts.append(f"{tuning.num_left} left: the same command goes on with them")
    return f"{', '.join(parts)}; {tuning.table.path}"


def _document(tuning: Tuning) -> dict[str, Any]:
    from quantkit.kernels.gpu import tuned

    reasons = {reason for outcome in tuning.outcomes for reason in outcome.dropped}
    return {
        "file": str(tuning.table.path),
        "device": tuning.table.device,
        "capability": tuning.table.capability,
        "versions": dict(tuning.table.versions),
        "entries": [tuned.to_entry(entry) for entry in tuning.table.entries],
        "finished": len(tuning.outcomes),
        "known_before": tuning.num_kept,
        "left": tuning.num_left,
        "failed": {outcome.case.label: outcome.problem for outcome in tuning.outcomes if outcome.problem},
        "candidates": sum(outcome.num_tried for outcome in tuning.outcomes),
        "dropped": {
            reason: sum(outcome.dropped.get(reason, 0) for outcome in tuning.outcomes) for reason in sorted(reasons)
        },
        "seconds": tuning.seconds,
    }


def _files(files: Sequence[TunedFile]) -> Table | str:
    from quantkit.report.table import Column, Table

    if not files:
        return "no GPU here and no file of tuned choices; kernels run with their defaults"
    rows = []
    for file in files:
        entries = None if file.table is None else str(len(file.table.entries))
        said = file.problem or "there is none"
        if file.table is not None:
            said = ", ".join(f"{name} {number}" for name, number in sorted(file.table.versions.items()))
        rows.append((file.device, str(file.path), entries, said, "yes" if file.is_in_force else "no"))
    return Table(columns=tuple(map(Column, ("GPU", "file", "choices", "measured with", "in force"))), rows=tuple(rows))


def _file_document(file: TunedFile) -> dict[str, Any]:
    return {
        "file": str(file.path),
        "device": file.device,
        "in_force": file.is_in_force,
        "entries": None if file.table is None else len(file.table.entries),
        "versions": None if file.table is None else dict(file.table.versions),
        "problem": file.problem or None,
    }


COMMAND = tune
