"""`quantkit eval`: tasks, perplexity and long contexts, of one model or of two compared item by item."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import _eval as show
from quantkit.cli._options import option_group, runtime_options, settings_of
from quantkit.cli._output import Output, output_options
from quantkit.evaluate.options import EvaluationOptions

if TYPE_CHECKING:
    from quantkit.report.table import Table
    from quantkit.results import EvaluationResult

EPILOG = """\b
Recovery: the model's score in per cent of the baseline's, with a 95 %
interval over the items that both answered.

\b
Examples:
  quantkit eval
  quantkit eval demo-awq-int4 --baseline quantkit/demo/model --suite standard
  quantkit eval --tasks demo_recall,demo_facts --limit 100 --kv-cache int8
  quantkit eval --suite long-context
  quantkit eval my-model --tasks hellaswag,piqa --data my-benchmarks
  quantkit eval my-model --text book.txt
"""


@click.command("eval", epilog=EPILOG, short_help="Perplexity and lm-eval tasks, alone or against the original.")
@click.argument("checkpoint", required=False)
@click.option("--baseline", metavar="MODEL", help="Ask this model the same, and compare item by item.")
@click.option("--noise", is_flag=True, help="Also ask the baseline in another arithmetic, to see how much is noise.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences computed together.  [default: 64]")
@output_options
@runtime_options
@option_group("asked", settings_of(EvaluationOptions))
def evaluate(
    output_to: Output,
    *,
    engine: dict[str, Any],
    checkpoint: str | None,
    baseline: str | None,
    noise: bool,
    batch: int | None,
    asked: dict[str, Any],
) -> None:
    """Evaluate CHECKPOINT, a directory or a hub id; without it, the bundled demo model.

    --kv-cache and --head are for CHECKPOINT; the baseline is asked with its keys, values and head as they are.
    """
    if noise and not baseline:
        raise click.UsageError("--noise is about the baseline: give --baseline too")
    from quantkit.evaluate.pairing import check_same_language, other_arithmetic
    from quantkit.evaluate.run import check_evaluation
    from quantkit.results.statistics.comparison import compare_evaluations

    quick = {} if {"tasks", "texts"} & asked.keys() else {"suite": "quick"}
    options = EvaluationOptions(**{**quick, **asked})
    settings = {**engine, "max_sequences": batch}
    check_evaluation(options)
    if baseline:
        check_same_language(checkpoint, baseline)
    result = _ask(output_to, checkpoint, settings, options)
    plain = {**settings, "kv_cache": "auto", "head_dtype": None}  # the original as it is
    original = None if baseline is None else _ask(output_to, baseline, plain, options)
    again = None
    if noise and original is not None:
        again = _ask(output_to, baseline, {**plain, "dtype": other_arithmetic(original.arithmetic)}, options)
    compared = () if original is None else compare_evaluations(result, original, again)

    def data() -> dict[str, Any]:
        document: dict[str, Any] = {"evaluation": result.to_dict()}
        if original is not None:
            document["baseline"] = original.to_dict()
            document["comparisons"] = [comparison.to_dict() for comparison in compared]
        return document

    def table() -> Table | None:
        from quantkit.report.tables import comparison_table

        return show.result_table(result) if original is None else comparison_table(compared)

    against = None if original is None else f"against {original.model} in {original.arithmetic}"
    output_to.result(data, lambda: show.settings_line(result), lambda: against, table)


def _ask(
    output_to: Output, model: str | None, settings: dict[str, Any], options: EvaluationOptions
) -> EvaluationResult:
    """Load, ask, and let go of the model again."""
    from quantkit.evaluate.engine import load_llm
    from quantkit.evaluate.run import evaluate as run

    def tell(text: str) -> None:
        output_to.tell(f"{model or 'the demo model'}: {text}")

    tell("loading")
    return run(load_llm(model, **settings), options, progress=tell)


COMMAND = evaluate
