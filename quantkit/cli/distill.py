"""`quantkit distill`: train the scales of a compressed checkpoint on the original's logits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import RUN, option_group, push_option, push_output, settings_of
from quantkit.cli._output import Command, Output
from quantkit.compress.distill.options import DistillOptions
from quantkit.quantities import byte_size, counted, elapsed
from quantkit.report.table import Table, facts

if TYPE_CHECKING:
    from quantkit.compress.distill.options import Distillation


@click.command("distill", cls=Command, short_help="Train a checkpoint's scales on the original's logits.")
@click.argument("checkpoint")
@click.option(
    "--baseline",
    metavar="MODEL",
    help="The original, a directory or a hub id.  [default: the model that CHECKPOINT was made from]",
)
@click.option("-o", "--output", metavar="DIR", help="Directory to create.  [default: ./<checkpoint>-distilled]")
@option_group("training", settings_of(DistillOptions))
@option_group("how", RUN)
@push_option
def command(
    output_to: Output,
    *,
    checkpoint: str,
    baseline: str | None,
    output: str | None,
    training: dict[str, Any],
    push_to_hub: str | None,
    how: dict[str, Any],
) -> None:
    """Train the scales, norms and biases of CHECKPOINT until its logits resemble those of the original.

    The codes stay as they are, so the result has the format and the size of CHECKPOINT. Use it where rounding loses
    much accuracy: at 2 and 3 bits, or at 4 bits per channel. If a run is interrupted, the same command continues where
    it stopped.

    \b
    Examples:
      quantkit quantize --recipe gptq-int4 --set weights.dtype=int2 -o demo-int2
      quantkit distill demo-int2 --samples 32 --steps 32 -o demo-int2-distilled
    """
    from quantkit.compress.distill.run import distill

    target = output or f"{Path(checkpoint).resolve().name}-distilled"
    result = distill(checkpoint, baseline, target, DistillOptions(**training), progress=output_to.tell, **how)
    push_output(target, push_to_hub, baseline)
    after = f"next: quantkit verify {target} --baseline {result.original}"
    output_to.result(asdict(result), _summary(result), after)


def _summary(result: Distillation) -> Table:
    saved = 1 - result.kl_after / result.kl_before if result.kl_before > 0 else 0.0
    outcome = f"{saved:.0%} less" if result.steps else "no step lowered it"
    ran = f"{counted(result.steps_run, 'step')}; the result is that of step {result.steps}"
    return facts(
        [
            ("checkpoint", result.checkpoint),
            ("trained", f"{counted(result.trained_numbers, 'number')}: scales, norms and biases"),
            ("held-out KL", f"{result.kl_before:.4g} → {result.kl_after:.4g}: {outcome}"),
            ("training", ran if result.steps else counted(result.steps_run, "step")),
            ("cost", f"{elapsed(result.seconds)}, peak {byte_size(result.peak_bytes)}"),
            ("output", result.output),
            *([] if result.steps else [("note", "no step lowered the held-out KL, so the weights are unchanged")]),
        ]
    )
