"""`quantkit imatrix`: write an importance matrix for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._options import RUN, Settings, option_group
from quantkit.cli._output import Command, Output
from quantkit.report.table import facts
from quantkit.settings import setting

_HOW: Settings = {
    "data": setting(
        "bundled",
        "Calibration text: 'bundled', a .txt or .jsonl file, or hub:NAME[:CONFIG].",
        flag="--calibration NAME|FILE",
    ),
    "samples": setting(128, "Number of calibration sequences.", flag="--samples", minimum=1),
    "sequence_length": setting(512, "Tokens per calibration sequence.", flag="--sequence-length", minimum=8),
    "seed": setting(0, "Seed for choosing calibration sequences.", flag="--seed", minimum=0),
    "device": RUN["device"],
    "overwrite": RUN["overwrite"],
}


@click.command("imatrix", cls=Command, short_help="Write an importance matrix for llama.cpp.")
@click.argument("model", required=False)
@click.option("-o", "--output", metavar="FILE", help="File to create.  [default: ./<model>-imatrix.gguf]")
@option_group("how", _HOW)
def command(output_to: Output, *, model: str | None, output: str | None, how: dict[str, Any]) -> None:
    """Run calibration text through MODEL, a directory or a hub id, and write the mean square of each linear's inputs.

    The file has the format of llama-imatrix: `llama-quantize --imatrix FILE` reads it, and so does
    `quantkit quantize --imatrix FILE`.

    \b
    Examples:
      quantkit imatrix --samples 16 -o demo-imatrix.gguf
    """
    from quantkit.cli._progress import showing_layers
    from quantkit.compress.pipeline.imatrix import collect_imatrix

    target = Path(output or f"{Path(model).resolve().name if model else 'demo'}-imatrix.gguf")
    matrix = collect_imatrix(model, target, progress=showing_layers(output_to), **how)
    count, tokens = len(matrix.means), int(max(float(count.max()) for count in matrix.counts.values()))
    rows = [("matrices", str(count)), ("tokens", f"{tokens:,}"), ("text", matrix.data), ("output", str(target))]
    output_to.result(
        {"output": str(target), "matrices": count, "tokens": tokens},
        facts(rows),
        f"next: llama-quantize --imatrix {target} MODEL-bf16.gguf MODEL-q4_k_m.gguf Q4_K_M",
    )
