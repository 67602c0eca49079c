"""`quantkit tune`: which tiles the kernels run with on this GPU, measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from quantkit.benchmark.options import TuneOptions
from quantkit.cli._options import option_group, settings_of
from quantkit.cli._output import Command, Output
from quantkit.quantities import elapsed
from quantkit.report.table import Column, Table

if TYPE_CHECKING:
    from quantkit.benchmark.tune import CaseReport, Outcome, Tuning
    from quantkit.benchmark.tune_device import TunedFile


@click.command("tune", cls=Command, short_help="Measure which tiles the kernels run fastest with on this GPU.")
@click.argument("model", required=False)
@option_group("settings", settings_of(TuneOptions))
@click.option("--list", "listing", is_flag=True, help="Show which files are in force, and measure nothing.")
def command(output_to: Output, *, model: str | None, listing: bool, settings: dict[str, Any]) -> None:
    """Choose tiles for MODEL, a directory or a hub id, on a GPU of this machine; without it, for an 8B Llama in INT4.

    Of the checkpoint only headers are read. Whatever is chosen computes the same; a choice that is not more than 2 %
    faster than the default is not taken. Nothing else should run on the GPU meanwhile.

    \b
    Examples:
      quantkit tune --list
      quantkit tune demo-awq-int4
      quantkit tune --shapes 8B --rows 1,16 --kv-cache auto,int8 --seconds 120
    """
    from quantkit.benchmark.tune_device import find_files, tune_device

    if listing:
        files = find_files()
        output_to.result(lambda: {"files": [_file_document(file) for file in files]}, lambda: _files(files))
        return
    tuning = tune_device(TuneOptions(model=model, **settings), report=_progress(output_to))
    output_to.result(lambda: _document(tuning), lambda: _table(tuning), lambda: _summary(tuning))


def _progress(output_to: Output) -> CaseReport:
    def report(outcome: Outcome | None, number: int, total: int) -> None:
        if outcome is not None:
            output_to.tell(f"{number}/{total} {outcome.case.label}: {_sentence(outcome)}")

    return report


def _sentence(outcome: Outcome) -> str:
    entry = outcome.entry
    if entry is None:
        return outcome.problem
    gain = "the default stays" if entry.ratio == 1 else f"{entry.ratio:.2f} times as fast as the default"
    dropped = "".join(f", {count} {reason}" for reason, count in outcome.dropped.items())
    return f"{entry.microseconds:.1f} us, {gain} ({outcome.num_tried} candidates{dropped})"


def _table(tuning: Tuning) -> Table:
    rows = []
    for outcome in tuning.outcomes:
        entry = outcome.entry
        times = entry and (entry.default_microseconds, entry.microseconds, entry.ratio)
        rows.append((outcome.case.kernel, outcome.case.label, *(times or (outcome.problem, None, None))))
    one, two = "{:.1f}".format, "{:.2f}".format
    speeds = Column("default us", one), Column("tuned us", one), Column("ratio", two)
    return Table(columns=(Column("kernel"), Column("shape"), *speeds), rows=tuple(rows))


def _summary(tuning: Tuning) -> str:
    done = len([outcome for outcome in tuning.outcomes if outcome.entry is not None])
    parts = [f"{done} measured in {elapsed(tuning.seconds)}"]
    if tuning.num_kept:
        parts.append(f"{tuning.num_kept} known before")
    if tuning.num_left:
        parts.append(f"{tuning.num_left} left: the same command goes on with them")
    return f"{', '.join(parts)}; {tuning.table.path}"


def _document(tuning: Tuning) -> dict[str, Any]:
    from quantkit.kernels.gpu import tuned

    dropped: Counter[str] = sum((Counter(outcome.dropped) for outcome in tuning.outcomes), Counter())
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
        "dropped": dict(sorted(dropped.items())),
        "seconds": tuning.seconds,
    }


def _files(files: Sequence[TunedFile]) -> Table | str:
    if not files:
        return "no GPU here and no file of tuned choices; kernels run with their defaults"
    rows = []
    for file in map(_file_document, files):
        versions = ", ".join(f"{name} {number}" for name, number in sorted((file["versions"] or {}).items()))
        measured = versions or file["problem"] or "there is none"
        rows.append((file["device"], file["file"], file["entries"], measured, "yes" if file["in_force"] else "no"))
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
