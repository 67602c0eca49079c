"""`quantkit eval`: tasks, perplexity and long contexts, of one model or of two compared item by item."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import _eval as show
from quantkit.cli._options import option_group
from quantkit.cli._output import Output, output_options
from quantkit.cli._runtime import runtime_options

if TYPE_CHECKING:
    from quantkit.evaluate.run import EvaluationOptions
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


def _names(_ctx: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """`a,b`, once or several times."""
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


_COUNT = click.IntRange(min=1)
_FOLDERS: dict[str, Any] = {"multiple": True, "type": click.Path(path_type=Path), "metavar": "DIR"}
_question_options = option_group(
    "asked",
    click.option(
        "--suite", metavar="NAME|FILE", help="Set of tasks: quick, standard or long-context.  [default: quick]"
    ),
    click.option(
        "--tasks", multiple=True, callback=_names, metavar="A,B", help="Tasks by name, lm-eval's and quantkit's own."
    ),
    click.option("--include-path", **_FOLDERS, help="Folder of further lm-eval task files; repeatable."),
    click.option(
        "--data", **_FOLDERS, help="Folder of items on disk, e.g. DIR/hellaswag/validation.jsonl; repeatable."
    ),
    click.option("--limit", type=_COUNT, help="Items of each task, at most.  [default: the suite's, or all]"),
    click.option(
        "--few-shot",
        "num_fewshot",
        type=click.IntRange(min=0),
        help="Solved examples before each item.  [default: the task's]",
    ),
    click.option(
        "--text", "texts", multiple=True, metavar="FILE", help="Measure the perplexity of this text; repeatable."
    ),
    click.option("--window", type=click.IntRange(min=2), help="Tokens per window of --text.  [default: 2048]"),
    click.option("--stride", type=_COUNT, help="Tokens from window to window of --text.  [default: a window]"),
    click.option(
        "--through",
        multiple=True,
        type=click.Choice(["prefill", "decode"]),
        help="How --text is computed: in prefills or token by token.",
    ),
    click.option("--chat", "chat_template", is_flag=True, help="Put prompts into the model's chat template."),
    click.option(
        "--bos/--no-bos",
        "add_bos",
        default=None,
        help="Put the begin-of-text token before every text.  [default: the tokenizer's]",
    ),
    click.option("--seed", type=click.IntRange(min=0), help="Seed of few-shot examples and long texts.  [default: 0]"),
)
"""Options that say what is asked."""


@click.command("eval", epilog=EPILOG, short_help="Perplexity and lm-eval tasks, alone or against the original.")
@click.argument("checkpoint", required=False)
@click.option("--baseline", metavar="MODEL", help="Ask this model the same, and compare item by item.")
@click.option("--noise", is_flag=True, help="Also ask the baseline in another arithmetic, to see how much is noise.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences computed together.  [default: 64]")
@output_options
@runtime_options
@_question_options
def evaluate(
    output_to: Output,
    engine: dict[str, Any],
    *,
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
    from quantkit.evaluate.run import EvaluationOptions, check_evaluation
    from quantkit.results.statistics import compare_evaluations

    options = EvaluationOptions(**_completed(asked))
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


def _completed(asked: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `EvaluationOptions`: the suite `quick` where nothing else is asked."""
    completed = {**asked, "through": asked["through"] or ("prefill",)}
    if not (completed["suite"] or completed["tasks"] or completed["texts"]):
        completed["suite"] = "quick"
    return completed


def _ask(
    output_to: Output, model: str | None, settings: dict[str, Any], options: EvaluationOptions
) -> EvaluationResult:
    """Load, ask, and let go of the model again."""
    from quantkit.evaluate.engine import load_llm
    from quantkit.evaluate.run import evaluate as run

    name = model or "the demo model"
    say = show.progress(name) if output_to.shows_progress else None
    if say is not None:
        say("loading")
    return run(load_llm(model, **settings), options, progress=say)


COMMAND = evaluate
