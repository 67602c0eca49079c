"""`quantkit convert`: write the codes of a quantized checkpoint, unchanged, in another on-disk format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import RUN, Settings, option_group, push_option, push_output
from quantkit.cli._output import Command, Output
from quantkit.quantities import byte_size, counted
from quantkit.report.table import Table, facts
from quantkit.settings import setting

if TYPE_CHECKING:
    from quantkit.compress.convert import Conversion


_HOW: Settings = {
    "type_name": setting(
        None,
        "Number type in the GGUF file, if CHECKPOINT is not quantized: q4_k, q6_k, q8_0, f16...",
        flag="--type TYPE",
        read=str.lower,
    ),
    "overwrite": RUN["overwrite"],
}


@click.command("convert", cls=Command, short_help="Write a checkpoint's codes in another format.")
@click.argument("checkpoint")
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",
    help="On-disk format: compressed-tensors, gptq, gptq-v2, awq, gguf, mlx or dense.",
)
@click.option(
    "-o", "--output", metavar="DIR|FILE", help="Directory or .gguf file to create.  [default: ./<checkpoint>-<format>]"
)
@option_group("how", _HOW)
@push_option
def command(
    output_to: Output, *, checkpoint: str, to: str, output: str | None, push_to_hub: str | None, how: dict[str, Any]
) -> None:
    """Write the codes of CHECKPOINT, a directory, in another format. One layer is in memory at a time.

    Nothing is rounded again: quantkit reads codes, scales and zero points back and compares them bit for bit. If the
    format cannot store the checkpoint, quantkit refuses and names the formats that can.

    \b
    Examples:
      quantkit quantize --recipe rtn-int4 --format gptq -o demo-gptq
      quantkit convert demo-gptq --to compressed-tensors -o demo-ct
      quantkit convert demo-gptq --to gguf -o demo-q4_0.gguf
      quantkit convert demo-gptq --to mlx -o demo-mlx
      quantkit inspect demo-gptq demo-ct
    """
    from quantkit.cli._progress import showing_layers
    from quantkit.compress.convert import convert as run
    from quantkit.formats import REGISTRY as FORMATS

    name, suffix = Path(checkpoint).resolve().name, FORMATS.load(to).suffix
    target = output or (f"{name}{suffix}" if suffix else f"{name}-{to}")
    result = run(checkpoint, to, target, progress=showing_layers(output_to), **how)
    push_output(target, push_to_hub, checkpoint)
    output_to.result(asdict(result), _summary(result), f"next: quantkit inspect {result.output}")


def _summary(result: Conversion) -> Table:
    return facts(
        [
            ("checkpoint", f"{result.source} ({result.source_format})"),
            ("linears", ", ".join(f"{count} x {name}" for name, count in result.stored.items())),
            ("compared", f"{counted(result.num_linears, 'linear')} read back, equal bit for bit"),
            ("size", f"{byte_size(result.source_bytes)} → {byte_size(result.output_bytes)}"),
            ("output", f"{result.output} ({result.format})"),
            *(("note", note) for note in result.notes),
        ]
    )
