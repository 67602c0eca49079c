"""`quantkit plan`: what a model would take and how fast it could be, before anything is spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from quantkit.cli._output import Output, output_options

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from quantkit.planning import Estimate

EPILOG = """\b
Examples:
  quantkit plan
  quantkit plan --params 7B
  quantkit plan --recipe awq-int4 --device 4090
  quantkit plan --params 70B --device h200 --json
  quantkit plan --memory 24GiB --bandwidth 900GB/s --context 512 --batch 8
"""

_PARAMS_HELP = "Only a number of parameters: 7B, or 30B-A3B with 3 billion active per token."


_OPTIONS = (
    click.option(
        "--shape", metavar="FILE", help="YAML or JSON file of sizes, named as in config.json, in place of MODEL."
    ),
    click.option("--params", metavar="NUMBER", help=_PARAMS_HELP),
    click.option(
        "--recipe", metavar="NAME|FILE", help="Plan this recipe; without one, compare the usual number types."
    ),
    click.option("--set", "changes", metavar="FIELD=VALUE", multiple=True, help="Change a recipe field; repeatable."),
    click.option(
        "--device", metavar="NAME", help="What fits on it, and how fast it could be: h200, h100, a100, l40s, 4090, ..."
    ),
    click.option(
        "--memory", metavar="SIZE", help="Memory to plan for, such as 24GiB; alone or in place of the device's."
    ),
    click.option(
        "--bandwidth", metavar="RATE", help="Measured bandwidth, such as 4.3TB/s, in place of the data sheet's."
    ),
    click.option(
        "--peak", metavar="RATE", help="Measured 16-bit peak, such as 780TFLOP/s, in place of the data sheet's."
    ),
    click.option(
        "--context", metavar="TOKENS", help="Tokens per sequence, such as 32k.  [default: 4096 or the model's]"
    ),
    click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once."),
    click.option(
        "--prompt", metavar="TOKENS", help="Tokens of a prompt whose prefill is timed.  [default: the context]"
    ),
    click.option(
        "--kv-cache",
        metavar="TYPE",
        help="Number type of keys and values: auto, bf16, fp8, int8 or int4; without it all are compared.",
    ),
    click.option("--head", metavar="TYPE", help="Number type of the output head when it is loaded: int8 or int4."),
)


def _plan_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of this command, in the order of _OPTIONS."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("plan", epilog=EPILOG, short_help="Predict memory, disk and the fastest possible speed of a model.")
@click.argument("model", required=False)
@_plan_options
@output_options
def plan(
    output_to: Output,
    *,
    model: str | None,
    shape: str | None,
    params: str | None,
    recipe: str | None,
    changes: tuple[str, ...],
    device: str | None,
    memory: str | None,
    bandwidth: str | None,
    peak: str | None,
    context: str | None,
    batch: int,
    prompt: str | None,
    kv_cache: str | None,
    head: str | None,
) -> None:
    """Say what MODEL would take and how fast it could be at best: computed from its shape, nothing is measured.

    MODEL is a directory, a config.json or a hub id; of its weights only the headers are read. Without it, the demo
    model that comes with quantkit. Floors are what no engine beats: bytes over bandwidth, operations over peak.
    """
    from quantkit.amounts import parse_bytes, parse_flops, parse_rate, parse_tokens
    from quantkit.errors import RecipeError
    from quantkit.planning import estimate, make_device, to_document

    if changes and recipe is None:
        raise RecipeError("--set changes a field of a recipe; give --recipe too")
    target = make_device(
        device,
        None if memory is None else parse_bytes(memory),
        None if bandwidth is None else parse_rate(bandwidth),
        None if peak is None else parse_flops(peak),
    )
    found = estimate(
        model,
        shape_file=shape,
        params=params,
        recipe=recipe,
        overrides=changes,
        device=target,
        context=None if context is None else parse_tokens(context),
        batch=batch,
        prompt=None if prompt is None else parse_tokens(prompt),
        kv_cache=kv_cache,
        head=head,
    )
    tables = [_overview, _weights]
    tables += [_caches] if found.caches else []
    tables += [_device] if found.device else []
    tables += [_compression, _loaders] if found.recipe else []
    output_to.result(lambda: to_document(found), *(lambda make=make: make(found) for make in (*tables, _footnote)))


def _grid(*titles: str, numbers: int = 0) -> Table:
    """A table without lines; its last columns are numbers, and neither they nor the names in front are broken."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(titles))
    for position, title in enumerate(titles):
        right = position >= len(titles) - numbers
        table.add_column(title, justify="right" if right else "left", no_wrap=right or position == 0)
    return table


def _overview(plan: Estimate) -> Table:
    from quantkit.amounts import human_bytes, human_count

    shape = plan.shape
    table = _grid()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "model", f"{shape.name}, counted from {'a ' if 'count' in shape.counted_from else ''}{shape.counted_from}"
    )
    active = shape.active_parameters
    text = f"{human_count(shape.num_parameters)} ({shape.num_parameters:,})"
    table.add_row("parameters", text if active == shape.num_parameters else f"{text}, {human_count(active)} per token")
    if shape.layers:
        kinds = "; ".join(f"{count} x {kind}" for kind, count in shape.attention_kinds.items())
        table.add_row("attention", kinds)
        limit = f"{shape.max_length:,} tokens" if shape.max_length else "not said"
        table.add_row("longest context", limit)
        table.add_row("activations", f"{human_bytes(plan.activations)}, an estimate for steps of 512 tokens")
    if plan.device is not None:
        table.add_row("device", f"{plan.device.title}, {human_bytes(plan.device.memory_bytes)}")
    for remark in plan.remarks:
        table.add_row("note", remark)
    return table


def _weights(plan: Estimate) -> Table:
    from quantkit.amounts import human_bytes

    table = _grid("weights", "bits/weight", "GB", "memory", "disk", "of now", numbers=5)
    first = next(row.size.total for row in plan.weights if row.problem is None)
    for row in plan.weights:
        if row.problem is not None:
            table.add_row(row.scheme.name, "", "", "", "", f"no: {row.problem}")
            continue
        size = row.size
        name = f"{row.scheme.name} ({plan.shape.dtype})" if row.scheme.name == "as stored" else row.scheme.name
        share = f"{100 * size.total / first:.0f} %"
        gigabytes = size.total / 1e9
        bits, decimal = f"{size.bits_per_weight:.3f}", f"{gigabytes:,.0f}" if gigabytes >= 100 else f"{gigabytes:.3g}"
        table.add_row(name, bits, decimal, human_bytes(size.total), human_bytes(size.disk), share)
    return table


def _caches(plan: Estimate) -> Table:
    from quantkit.amounts import human_bytes

    table = _grid("KV cache", "B/token", f"{plan.context:,} tokens", f"batch of {plan.batch}", "compression", numbers=4)
    first = plan.caches[0].per_sequence
    for row in plan.caches:
        one = row.per_sequence
        numbers = (f"{row.per_token:,.0f}", human_bytes(round(one)), human_bytes(round(plan.batch * one)))
        table.add_row(row.form.name, *numbers, f"{first / one:.2f}")
    return table


def _device(plan: Estimate) -> Table:
    from quantkit.amounts import human_time

    table = _grid("weights", "KV cache", "batch", "context", "step", "tokens/s", "prefill", numbers=5)
    for row in plan.on_device:
        cells = ["does not fit", ""]
        if row.fit.left >= 0:
            cells = [_count(row.fit.batch), _count(row.fit.context)]
        if row.decode is None or not row.decode.seconds:
            cells += ["", ""]
        else:
            cells += [human_time(row.decode.seconds), f"{plan.batch / row.decode.seconds:,.0f}"]
        cells.append("" if row.prefill is None else human_time(row.prefill.seconds))
        table.add_row(row.scheme.name, "" if row.form is None else row.form.name, *cells)
    return table


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _compression(plan: Estimate) -> Table:
    from quantkit.amounts import human_bytes

    recipe, parts = plan.recipe, plan.compression
    assert recipe is not None and parts is not None
    table = _grid(f"compressing with {recipe.name}", "memory", numbers=1)
    titles = {
        "layer": "weights of one layer",
        "hidden_states": f"hidden states of {recipe.num_tokens:,} tokens (or on disk)",
        "statistics": "statistics of the steps",
        "working_copies": "working copies",
    }
    for key, size in parts.items():
        if size:
            table.add_row(titles[key], human_bytes(size))
    table.add_row("together", human_bytes(sum(parts.values())))
    table.add_row("disk for the result", human_bytes(plan.weights[-1].size.disk))
    return table


def _loaders(plan: Estimate) -> Table:
    recipe = plan.recipe
    assert recipe is not None
    table = _grid(f"who reads {recipe.format}", "", "")
    for reading in plan.readings:
        table.add_row(reading.loader, "yes" if reading.reads else "no", reading.reason)
    return table


def _footnote(plan: Estimate) -> RenderableType:
    text = "Computed, not measured."
    device = plan.device
    if device is None:
        return f"{text} Give --device NAME or --memory SIZE for what fits and how fast it could be."
    if plan.shape.layers:
        text += (
            f" batch: the most sequences of {plan.context:,} tokens that fit; context: the longest that fits at batch "
            f"{plan.batch}, up to the model's own limit. 5 % of the memory is kept back."
        )
    given = [f"{device.bandwidth / 1e12:.3g} TB/s"] if device.bandwidth else []
    given += [f"{device.peaks['bf16'] / 1e12:.4g} TFLOP/s in 16 bits"] if device.peaks else []
    if not given:
        return text
    return (
        f"{text} step and tokens/s: floors of a decode step of batch {plan.batch} at {plan.context:,} tokens; prefill: "
        f"of {plan.prompt:,} tokens; both at {' and '.join(given)}, nothing lost. Good engines reach 55 to 85 %."
    )


COMMAND = plan
