"""`quantkit inspect`: what is in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from quantkit.cli._output import Output, output_options

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from quantkit.inspection import CheckpointDifference
    from quantkit.results import CheckpointSummary

EPILOG = """\b
Examples:
  quantkit quantize --recipe rtn-int8 -o demo-int8
  quantkit inspect demo-int8
  quantkit inspect demo-int8 --json
  quantkit quantize --recipe rtn-int4 -o demo-int4
  quantkit inspect demo-int8 demo-int4
"""


@click.command("inspect", epilog=EPILOG, short_help="Show number types, sizes and errors of a checkpoint.")
@click.argument("checkpoint")
@click.argument("other", required=False)
@output_options
def inspect_checkpoint(output_to: Output, *, checkpoint: str, other: str | None) -> None:
    """Show what CHECKPOINT stores: number types, bits per weight, sizes, and per-layer errors.

    Directories of any known format, ordinary models and GGUF files can be read; errors are known for those that
    quantkit wrote. With a second one, show what differs between the two.
    """
    from quantkit.inspection import compare, inspect
    from quantkit.results import to_dict

    if other is not None:
        difference = compare(checkpoint, other)
        output_to.result(lambda: to_dict(difference), lambda: _difference(difference))
        return
    summary = inspect(checkpoint)
    output_to.result(
        lambda: to_dict(summary), lambda: _overview(summary), lambda: _modules(summary), lambda: _layers(summary)
    )


def _difference(difference: CheckpointDifference) -> RenderableType:
    from rich.table import Table

    if difference.is_empty:
        return "no difference in headers and configuration; tensors were not compared"
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("differs", difference.left, difference.right):
        table.add_column(title, overflow="fold")
    for row in (*difference.facts, *difference.modules, *difference.entries):
        table.add_row(*row)
    return table


def _overview(summary: CheckpointSummary) -> Table:
    from rich.table import Table

    from quantkit.amounts import human_bytes
    from quantkit.results import describe_caches, describe_experts

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("checkpoint", summary.path)
    table.add_row("architecture", summary.architecture)
    table.add_row("format", summary.format)
    if summary.recipe is not None:
        table.add_row("recipe", summary.recipe)
    table.add_row("parameters", f"{summary.num_parameters:,}")
    table.add_row("size", human_bytes(summary.num_bytes))
    if summary.bits_per_weight is not None:
        table.add_row("bits per weight", f"{summary.bits_per_weight:.3f} (quantized linears)")
    cache = describe_caches(summary.layers)
    if cache is not None:
        table.add_row("KV cache", cache)
    experts = describe_experts(summary.layers)
    if experts is not None:
        table.add_row("experts", experts)
    return table


def _modules(summary: CheckpointSummary) -> Table:
    from rich.table import Table

    from quantkit.amounts import human_bytes

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("module", overflow="fold")
    table.add_column("stored as")
    for title in ("count", "parameters", "size"):
        table.add_column(title, justify="right")
    for row in summary.modules:
        table.add_row(row.kind, row.stored_as, str(row.count), f"{row.num_parameters:,}", human_bytes(row.num_bytes))
    return table


def _layers(summary: CheckpointSummary) -> RenderableType:
    from rich.table import Table

    if not summary.layers:
        return "no per-layer errors: quantkit.json is missing or lists none"
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("layer", overflow="fold")
    table.add_column("output SNR", justify="right")
    table.add_column("worst error", justify="right")
    table.add_column("rounded", justify="right")
    table.add_column("of linear", overflow="fold")
    for layer in summary.layers:
        snr = "" if layer.output_snr_db is None else f"{layer.output_snr_db:.1f} dB"
        worst = max(layer.linears, key=lambda linear: linear.error, default=None)
        numbers = ("", "", "") if worst is None else (f"{worst.error:.4f}", f"{worst.rounding_error:.4f}", worst.name)
        table.add_row(layer.name, snr, *numbers)
    return table


COMMAND = inspect_checkpoint
