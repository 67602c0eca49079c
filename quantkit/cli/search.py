"""`quantkit search`: find which numbers each part of a model should have, and write them as a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import option_group
from quantkit.cli._output import Output, output_options
from quantkit.quantities import byte_size, elapsed

if TYPE_CHECKING:
    from quantkit.report.table import Table
    from quantkit.results import SearchResult

EPILOG = """\b
Examples:
  quantkit search --bits 4.5
  quantkit search --bits 3.5 --set calibration.samples=32 -o coarse.yaml
  quantkit search --kl 0.02 --work trials -o small.yaml
  quantkit search --recovery 99 --candidates int3,int4,int8 --work trials
"""


_target_options = option_group(
    "wished",
    click.option(
        "--bits", type=click.FloatRange(min=0, min_open=True), help="Target: stored bits per weight, at most."
    ),
    click.option("--size", metavar="SIZE", help="Target: size of the whole checkpoint, at most, e.g. 2GiB."),
    click.option("--kl", type=click.FloatRange(min=0, min_open=True), help="Target: mean KL to the original, at most."),
    click.option(
        "--recovery", type=click.FloatRange(0, 100), help="Target: per cent of the original's task scores, at least."
    ),
)
"""Options that say what is asked for."""


_search_options = option_group(
    "how",
    click.option(
        "--candidates",
        metavar="A,B",
        help="Number types to choose from, e.g. int4,int4:32,int8:channel.  [default: all integers]",
    ),
    click.option("--text", metavar="FILE", help="Text that the loss is measured on.  [default: a shipped one]"),
    click.option(
        "--tokens",
        type=click.IntRange(min=2),
        default=8192,
        show_default=True,
        help="Tokens of that text for each measurement.",
    ),
    click.option("--work", metavar="DIR", help="Folder that keeps trials and numbers for further searches."),
    click.option("--checkpoint", metavar="DIR", help="Folder for the compressed model that is measured at the end."),
    click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:i]", help="Where to compute."),
    click.option(
        "--dtype", default="fp32", show_default=True, metavar="auto|bf16|fp16|fp32", help="Arithmetic to measure in."
    ),
    click.option("--threads", type=click.IntRange(min=1), help="CPU threads to measure with.  [default: measured]"),
    click.option(
        "--resume/--no-resume",
        default=True,
        show_default=True,
        help="Go on where a killed search stopped, or start over.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace an existing recipe file or checkpoint."),
)
"""Options that say how to search."""


@click.command("search", epilog=EPILOG, short_help="Find the bits that each part of a model should have.")
@click.argument("model", required=False)
@_target_options
@click.option("--recipe", default="gptq-int4", show_default=True, metavar="NAME|FILE", help="Recipe to start from.")
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change a recipe field; repeatable.")
@click.option("-o", "--output", metavar="FILE", help="Recipe to write.  [default: ./<model>-<target>.yaml]")
@_search_options
@output_options
def search(
    output_to: Output,
    *,
    model: str | None,
    recipe: str,
    changes: tuple[str, ...],
    output: str | None,
    wished: dict[str, Any],
    how: dict[str, Any],
) -> None:
    """Measure what each part of MODEL loses at each number of bits, choose for a target, and write a recipe.

    Without MODEL, the demo model that comes with quantkit. The recipe runs unchanged through `quantkit quantize`; what
    it is expected to cost, and what it cost when it was tried, is printed and written into it.
    """
    given = [name for name, value in wished.items() if value is not None]
    if len(given) != 1:
        raise click.UsageError("give one of --bits, --size, --kl and --recovery")
    from quantkit import allocation
    from quantkit.compress.recipe import load
    from quantkit.errors import GateFailure
    from quantkit.quantities import parse_bytes

    target = allocation.SearchTarget(
        bits=wished["bits"],
        num_bytes=None if wished["size"] is None else parse_bytes(wished["size"]),
        kl=wished["kl"],
        recovery=wished["recovery"],
    )
    options = allocation.SearchOptions(
        recipe=load(recipe, changes),
        output=None if output is None else Path(output),
        candidates=tuple(filter(None, (how["candidates"] or "").split(","))),
        text=how["text"],
        max_tokens=how["tokens"],
        work=None if how["work"] is None else Path(how["work"]),
        checkpoint=None if how["checkpoint"] is None else Path(how["checkpoint"]),
        device=how["device"],
        engine={name: how[name] for name in ("dtype", "threads") if how[name] is not None},
        resume=how["resume"],
        overwrite=how["overwrite"],
    )
    tell: Callable[[str], None] = lambda text: click.echo(text, err=True) if output_to.shows_progress else None  # noqa: E731
    result = allocation.search(model, target, options, progress=tell)
    output_to.result(result.to_dict, lambda: _summary(result), lambda: _choices(result), lambda: _next_steps(result))
    if result.reached:
        return
    if output_to.as_json:
        click.get_current_context().exit(GateFailure.exit_code)
    raise GateFailure(_missed(result))


def _summary(result: SearchResult) -> Table:
    from quantkit.report.table import facts

    chosen = f"{result.search_kl:.5f} on the tokens it was chosen on, {result.sum_kl:.5f} added up group by group"
    return facts(
        [
            ("model", result.model),
            ("target", f"{result.target}, {'reached' if result.reached else 'missed'}"),
            ("bits per weight", f"{result.bits_per_weight:.3f}, scales included"),
            ("size", byte_size(result.output_bytes)),
            ("expected KL", f"{result.expected_kl:.5f} on {result.data} ({chosen})"),
            ("measured KL", f"{result.measured_kl:.5f} (expected {100 * result.prediction_error:+.0f} %)"),
            ("recovery", None if result.recovery is None else f"{result.recovery:.2f} %"),
            ("time", elapsed(result.seconds)),
            *(("note", text) for text in result.notes),
        ]
    )


def _choices(result: SearchResult) -> Table:
    from quantkit.report.tables import layer_table

    return layer_table("chosen, by layer", {(group.layer, group.group): group.choice for group in result.groups})


def _missed(result: SearchResult) -> str:
    reached = f"KL {result.measured_kl:.5f}" if result.recovery is None else f"recovery {result.recovery:.2f} %"
    return (
        f"{result.target} was not reached: {result.recipe} gives {reached} at {result.bits_per_weight:.3f} bits; "
        "allow more, or give larger candidates"
    )


def _next_steps(result: SearchResult) -> str:
    return f"written to {result.recipe}; next: quantkit quantize {_argument(result)}--recipe {result.recipe} --verify"


def _argument(result: SearchResult) -> str:
    return "" if result.model == "demo" else f"{result.model} "


COMMAND = search
