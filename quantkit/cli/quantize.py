"""`quantkit quantize`: compress a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import _verify
from quantkit.cli._output import Output, human_seconds, output_options

if TYPE_CHECKING:
    from rich.table import Table

    from quantkit.results import CompressionResult

EPILOG = """\b
Examples:
  quantkit quantize --recipe awq-int4 --samples 16 -o demo-int4
  quantkit quantize --recipe rtn-int4 --set weights.group_size=32 -o demo-g32
  quantkit quantize --recipe gptq-int4 --samples 16 -o demo-gptq
  quantkit quantize --recipe w8a8-int8 --samples 16 --activations disk
  quantkit quantize --recipe awq-int4 --verify --gate "kl<=0.05" -o demo-safe
"""


def _field_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that are recipe fields; they arrive together as `fields`, in the form of --set."""

    @click.option(
        "--calibration",
        metavar="NAME|FILE",
        help="Calibration text: bundled, a .txt or .jsonl file, or hub:NAME[:CONFIG].",
    )
    @click.option(
        "--samples", type=click.IntRange(min=1), help="Number of calibration sequences.  [default: the recipe's]"
    )
    @click.option(
        "--sequence-length",
        type=click.IntRange(min=8),
        help="Tokens per calibration sequence.  [default: the recipe's]",
    )
    @click.option(
        "--format", "format_name", metavar="NAME", help="On-disk format of the result.  [default: the recipe's]"
    )
    @click.option("--seed", type=click.IntRange(min=0), help="Seed of everything random.  [default: the recipe's]")
    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> None:
        fields = {flag: options.pop(flag) for flag in FLAGS}
        function(*args, fields=_flag_changes(fields), **options)

    return command


def _run_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how to work, not what to make; they arrive together as `how`."""

    @click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:i]", help="Where to compute.")
    @click.option(
        "--activations",
        type=click.Choice(["ram", "disk"]),
        default="ram",
        show_default=True,
        help="Where hidden states are kept between layers.",
    )
    @click.option(
        "--resume/--no-resume", default=True, show_default=True, help="Go on where a killed run stopped, or start over."
    )
    @click.option("--overwrite", is_flag=True, help="Replace an existing output directory.")
    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> None:
        how = {name: options.pop(name) for name in ("device", "activations", "resume", "overwrite")}
        function(*args, how=how, **options)

    return command


@click.command("quantize", epilog=EPILOG, short_help="Compress a model.")
@click.argument("model", required=False)
@click.option("--recipe", required=True, metavar="NAME|FILE", help="A shipped recipe or a .yaml file.")
@click.option("-o", "--output", metavar="DIR", help="Directory to create.  [default: ./<model>-<recipe>]")
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change a recipe field; repeatable.")
@_field_options
@_run_options
@click.option("--push-to-hub", metavar="USER/NAME", help="Upload the result with a model card.")
@click.option("--verify", is_flag=True, help="Prove the result; one that fails is kept as DIR.failed, exit code 3.")
@_verify.gate_option
@output_options
def quantize(
    output_to: Output,
    *,
    model: str | None,
    recipe: str,
    output: str | None,
    changes: tuple[str, ...],
    how: dict[str, Any],
    push_to_hub: str | None,
    verify: bool,
    gates: tuple[str, ...] | None,
    fields: list[str],
) -> None:
    """Compress MODEL, a directory or a hub id, to a new checkpoint; without MODEL, the bundled demo model.

    One decoder layer is in memory at a time. A run that is killed goes on where it stopped when the same command is
    given again.
    """
    import quantkit.compress.pipeline as pipeline
    from quantkit.cli._progress import for_output
    from quantkit.compress.recipe import load
    from quantkit.results import to_dict

    plan = load(recipe, [*changes, *fields])
    if verify:
        _verify.check_before(plan, gates)
    with for_output(output_to) as listener:
        result = pipeline.quantize(model, plan, output, listener=listener, **how)
    if verify:  # a checkpoint that fails goes nowhere
        _verify.prove(output_to, result, model, gates, how["device"], lambda: _summary(result))
    if push_to_hub:
        from quantkit.hub import find_origin, push

        push(result.output, push_to_hub, origin=find_origin(model))
    if not verify:
        output_to.result(
            lambda: to_dict(result),
            lambda: _summary(result),
            *([lambda: _worst(result)] if result.num_quantized else []),
            lambda: _next_steps(result),
        )


FLAGS = {
    "calibration": "calibration.data",
    "samples": "calibration.samples",
    "sequence_length": "calibration.sequence_length",
    "format_name": "format",
    "seed": "seed",
}


def _flag_changes(fields: dict[str, Any]) -> list[str]:
    """The options that are recipe fields, as `path=value`; JSON text is YAML that needs no guessing."""
    import json

    return [f"{path}={json.dumps(fields[flag])}" for flag, path in FLAGS.items() if fields[flag] is not None]


def _summary(result: CompressionResult) -> Table:
    from rich.table import Table

    from quantkit.amounts import human_bytes
    from quantkit.results import describe_caches, describe_experts

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    ratio = result.source_bytes / result.output_bytes if result.output_bytes else 0.0
    sizes = f"{human_bytes(result.source_bytes)} → {human_bytes(result.output_bytes)} ({ratio:.2f}x smaller)"
    layers = f"{result.num_layers}, with {result.num_quantized} linears quantized, {len(result.ignored)} ignored"
    if result.resumed_layers:
        layers += f"; {result.resumed_layers} layers taken over from an interrupted run"
    table.add_row("model", result.model)
    table.add_row("recipe", f"{result.recipe} ({result.format})")
    table.add_row("layers", layers)
    if result.num_quantized:
        table.add_row("bits per weight", f"{result.bits_per_weight:.3f}")
    cache = describe_caches(result.layers)
    if cache is not None:
        table.add_row("KV cache", cache)
    experts = describe_experts(result.layers)
    if experts is not None:
        table.add_row("experts", experts)
    table.add_row("size", sizes)
    table.add_row("time", _times(result))
    table.add_row("peak memory", human_bytes(result.peak_bytes))
    table.add_row("output", result.output)
    return table


def _times(result: CompressionResult) -> str:
    phases = sorted(result.seconds.items(), key=lambda pair: pair[1], reverse=True)
    total = human_seconds(sum(result.seconds.values()))
    return f"{total}: " + ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in phases)


def _worst(result: CompressionResult) -> Table:
    from rich.table import Table

    table = Table(
        title="worst linears by relative error, and that of plain rounding",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("linear", overflow="fold")
    table.add_column("weights", no_wrap=True)
    table.add_column("error", justify="right")
    table.add_column("rounded", justify="right")
    table.add_column("of", no_wrap=True)
    for name, linear in result.worst_linears():
        weights = linear.scheme.partition(",")[0]  # activations are not part of this error
        table.add_row(name, weights, f"{linear.error:.4f}", f"{linear.rounding_error:.4f}", linear.measure)
    return table


def _next_steps(result: CompressionResult) -> str:
    return f"next: quantkit inspect {result.output}"


COMMAND = quantize
