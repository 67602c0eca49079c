"""`quantkit inspect`: show what a checkpoint contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from quantkit.cli._output import Command, Output
from quantkit.quantities import byte_size
from quantkit.report.table import Column, Table, facts

if TYPE_CHECKING:
    from quantkit.results import CheckpointDifference, CheckpointSummary

_SHOWN = 100  # characters of an entry of a GGUF file


@click.command("inspect", cls=Command, short_help="Show number types, sizes and errors of a checkpoint.")
@click.argument("checkpoint", required=False)
@click.argument("other", required=False)
@click.option(
    "--device",
    is_flag=False,
    flag_value="auto",
    metavar="[cuda:i]",
    help="Compare the GPU kernels with torch on this device.",
)
def command(output_to: Output, *, checkpoint: str | None, other: str | None, device: str | None) -> None:
    """Show what CHECKPOINT stores: number types, bits per weight, sizes, per-layer errors, and which engines read it.

    CHECKPOINT is a directory in any known format, an unquantized model or a GGUF file. Per-layer errors are known only
    for checkpoints that quantkit wrote. With a second checkpoint, quantkit shows the differences between the two. With
    --device and no checkpoint, it compares its kernels with torch on a GPU of this machine and stores the verdicts; the
    first load of a model on that GPU does the same.

    \b
    Examples:
      quantkit quantize --recipe rtn-int8 -o demo-int8
      quantkit inspect demo-int8
      quantkit inspect demo-int8 --json
      quantkit quantize --recipe rtn-int4 -o demo-int4
      quantkit inspect demo-int8 demo-int4
    """
    if device is not None and checkpoint is None:
        _show_kernels(output_to, device)
        return
    if device is not None or checkpoint is None:
        raise click.UsageError("give either CHECKPOINT or --device")
    from quantkit.inspection import compare, inspect
    from quantkit.report.tables import engine_table, module_table

    if other is not None:
        difference = compare(checkpoint, other)
        output_to.result(difference.to_dict(), _difference(difference))
        return
    summary = inspect(checkpoint)
    tables = _overview(summary), module_table(summary), _layers(summary), engine_table("who reads it", summary.engines)
    output_to.result(summary.to_dict(), *tables)


def _show_kernels(output_to: Output, device: str) -> None:
    from quantkit.machine.devices import pick_device
    from quantkit.runtime.engine.kernel_check import identity, self_test, verdict_file

    chosen = pick_device(device)
    about, verdicts = {**identity(chosen), "kept in": str(verdict_file(chosen))}, self_test(chosen)
    checks = [(key, f"{'kernels' if verdict.passed else 'torch'}: {verdict.text}") for key, verdict in verdicts.items()]
    data = {"about": about, "checks": {key: verdict._asdict() for key, verdict in verdicts.items()}}
    output_to.result(data, facts([*about.items(), *checks]))


def _difference(difference: CheckpointDifference) -> Table | str:
    rows = (*difference.facts, *difference.modules, *difference.entries)
    if not rows:
        return "no difference in headers and configuration; the values of tensors were not compared"
    return Table(columns=tuple(map(Column, ("differs", difference.left, difference.right))), rows=rows)


def _overview(summary: CheckpointSummary) -> Table:
    from quantkit.report.tables import storage_rows

    return facts(
        [
            ("checkpoint", summary.path),
            ("architecture", summary.architecture),
            ("format", summary.format),
            ("recipe", summary.recipe),
            ("adapter", None if summary.adapter is None else summary.adapter.describe()),
            ("parameters", f"{summary.num_parameters:,}"),
            ("size", byte_size(summary.num_bytes)),
            *storage_rows(summary.bits_per_weight, summary),
            *((key[:_SHOWN], value[:_SHOWN]) for key, value in summary.made_by.items() if key != "quantkit.recipe"),
            ("quantkit.recipe", "in --json" if "quantkit.recipe" in summary.made_by else None),
        ]
    )


def _layers(summary: CheckpointSummary) -> Table | str | None:
    if summary.format == "gguf":  # a GGUF file cannot store errors per layer
        return None
    if not summary.layers:
        return "no per-layer errors: quantkit.json is missing or lists none"
    if not any(layer.linears for layer in summary.layers):  # only the KV cache is quantized
        return None
    rows = []
    for layer in summary.layers:
        worst = max(layer.linears, key=lambda linear: linear.error, default=None)
        errors = ("", "", "") if worst is None else (worst.error, worst.rounding_error, worst.name)
        rows.append((layer.name, "" if layer.output_snr_db is None else layer.output_snr_db, *errors))
    four = "{:.4f}".format
    numbers = Column("output SNR", "{:.1f} dB".format), Column("worst error", four), Column("rounded", four)
    return Table(columns=(Column("layer"), *numbers, Column("of linear")), rows=tuple(rows))
