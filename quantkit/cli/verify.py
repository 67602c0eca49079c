"""`quantkit verify`: a checkpoint beside its original, and whether it keeps its promises."""

from pathlib import Path
from typing import Any

import click

from quantkit.cli import _verify
from quantkit.cli._options import engine_choice, option_group, ranks_option, runtime_options, settings_of
from quantkit.cli._output import Command, Output
from quantkit.evaluate.options import EvaluationOptions

ASKED = ("suite", "tasks", "limit", "data", "include_path", "text_tokens", "seed")


@click.command("verify", cls=Command, short_help="Verify a checkpoint: accuracy, fidelity, speed, then gates.")
@click.argument("checkpoint")
@click.option("--baseline", metavar="MODEL", help="The original model.  [default: what it was made from]")
@click.option("-o", "--output", metavar="DIR", help="Folder for report and model card.  [default: CHECKPOINT]")
@click.option("--bench/--no-bench", default=True, show_default=True, help="Time both models.")
@click.option(
    "--sensitivity/--no-sensitivity",
    default=None,
    help="Find the parts of the model that hurt.  [default: when accuracy fails]",
)
@click.option("--text", metavar="FILE", help="Text that both models' distributions are compared on.")
@_verify.gate_option
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
    """Read CHECKPOINT back from disk, run it beside its original, and judge it by gates; exit code 3 if one fails.

    Writes report.json, report.html, junit.xml and README.md, the model card.

    \b
    Gates: recovery, recovery[TASK], score[TASK], perplexity, perplexity_ratio,
      kl, kl_p99, top1, length_ratio, ttft_ratio, itl_ratio, tpot_ratio,
      throughput_ratio, memory_ratio, size_ratio, bits_per_weight.

    \b
    Examples:
      quantkit quantize --recipe awq-int4 -o demo-awq-int4
      quantkit verify demo-awq-int4
      quantkit verify demo-awq-int4 --gate "recovery>=98.9" --gate "kl<=0.05"
      quantkit verify demo-awq-int4 --kv-cache int8 --no-bench -o int8-cache
      quantkit verify demo-awq-int4 --engine vllm
      quantkit verify demo-awq-int4 --sensitivity --suite none --gate "kl<=0.01"
    """
    from quantkit.distributed import is_writer
    from quantkit.evaluate.verify.pair import check_output, check_pair, write_files
    from quantkit.evaluate.verify.run import check_options, verify_pair

    options = _verify.verify_options(**what)
    check_options(options)
    pair = check_pair(checkpoint, baseline, gates)
    folder = pair.path if output is None else Path(output)
    check_output(folder)
    report = verify_pair(pair, options, progress=output_to.tell)
    files, problem = write_files(report, folder) if is_writer() else ({}, "")
    _verify.finish(output_to, report, files, problem)
