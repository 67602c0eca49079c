"""`quantkit eval`: tasks, perplexity and long contexts of one model, or of two models compared item by item."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import Settings, engine_choice, option_group, ranks_option, settings_of, with_one_adapter
from quantkit.cli._output import Command, Output
from quantkit.evaluate.options import EvaluationOptions
from quantkit.quantities import counted
from quantkit.report.table import Column, Table
from quantkit.runtime.config import EngineConfig
from quantkit.settings import setting

if TYPE_CHECKING:
    from quantkit.results import EvaluationResult


_ENGINE: Settings = {
    "max_sequences": setting(
        None, "Maximum number of sequences computed together.", flag="--batch", minimum=1, shown="64"
    ),
    **settings_of(EngineConfig),
}


@click.command("eval", cls=Command, short_help="Measure perplexity and lm-eval tasks, alone or against the original.")
@click.argument("checkpoint", required=False)
@click.option("--baseline", metavar="MODEL", help="Evaluate this model too, and compare the two models item by item.")
@click.option("--noise", is_flag=True, help="Also evaluate the baseline in another dtype, to measure noise.")
@option_group("engine", _ENGINE)
@option_group("asked", settings_of(EvaluationOptions))
@engine_choice
@ranks_option
def command(
    output_to: Output,
    *,
    engine: dict[str, Any],
    checkpoint: str | None,
    baseline: str | None,
    noise: bool,
    asked: dict[str, Any],
    vllm: dict[str, Any] | None,
) -> None:
    """Evaluate CHECKPOINT, a directory or a hub id; without it, the bundled demo model.

    --kv-cache and --head apply only to CHECKPOINT; the baseline's cache and head stay unquantized.

    \b
    Recovery: the model's score in per cent of the baseline's, with a 95 %
    interval over the items that both answered.

    \b
    Examples:
      quantkit eval
      quantkit eval demo-awq-int4 --baseline quantkit/demo/model --suite standard
      quantkit eval --tasks demo_recall,demo_facts --limit 100 --kv-cache int8
      quantkit eval my-model --tasks hellaswag,piqa --data my-benchmarks
      quantkit eval my-model --tasks hellaswag --engine vllm
      quantkit eval my-model --text book.txt
    """
    if noise and not baseline:
        raise click.UsageError("--noise needs a baseline; give --baseline too")
    from quantkit.evaluate.loading import check_same_language, other_arithmetic
    from quantkit.evaluate.run import check_evaluation
    from quantkit.evaluate.verify.run import of_the_original

    # If the user names tasks, texts or prompts, only those are evaluated, and no suite.
    engine = with_one_adapter(engine)
    quick = {} if {"tasks", "texts", "prompts"} & asked.keys() else {"suite": "quick"}
    options = EvaluationOptions(**{**quick, **asked})
    check_evaluation(options)
    if baseline:
        check_same_language(checkpoint, baseline)
    result, original, again = _ask(output_to, checkpoint, engine, vllm, options), None, None
    if baseline:
        plain, vllm = of_the_original(engine), None if vllm is None else of_the_original(vllm)
        original = _ask(output_to, baseline, plain, vllm, options)
        if noise:
            plain["dtype"] = other_arithmetic(original.arithmetic)
            again = _ask(output_to, baseline, plain, vllm, options)
    _show(output_to, result, original, again)


def _show(
    output_to: Output, result: EvaluationResult, original: EvaluationResult | None, again: EvaluationResult | None
) -> None:
    """Print the results of a model, alone or beside its original and the original in another dtype (`again`)."""
    from quantkit.report.behaviour_tables import rate_table
    from quantkit.report.tables import comparison_table
    from quantkit.results.statistics.comparison import compare_evaluations

    data: dict[str, Any] = {"evaluation": result.to_dict()}
    tables: tuple[Table | str | None, ...] = (_result_table(result),)
    if original is not None:
        compared, beside = compare_evaluations(result, original, again), f"{original.model} in {original.arithmetic}"
        data |= {"baseline": original.to_dict(), "comparisons": [comparison.to_dict() for comparison in compared]}
        tables = f"against {beside}", comparison_table(compared), rate_table(compared)
    decisive = {"model": result.model, "computed in": result.arithmetic, **result.settings}
    settings = " · ".join(f"{name} {value}" for name, value in decisive.items() if value)
    output_to.result(data, settings, *tables, "\n".join(result.parts_read) or None)


def _ask(
    output_to: Output,
    model: str | None,
    settings: dict[str, Any],
    vllm: dict[str, Any] | None,
    options: EvaluationOptions,
) -> EvaluationResult:
    """Load a model, evaluate it, and free it."""
    from quantkit.evaluate.loading import load_llm
    from quantkit.evaluate.run import evaluate
    from quantkit.evaluate.work_sharing import about
    from quantkit.runtime.vllm_engine import VllmLLM

    name = model or "the demo model"
    say = about(name, output_to.tell)
    say("loading")
    if vllm is None:
        return evaluate(load_llm(model, **settings), options, progress=say)
    with VllmLLM(model, options=vllm, **settings) as served:
        return evaluate(served, options, progress=say)


def _result_table(result: EvaluationResult) -> Table:
    """Return a table with one row per task and text."""
    rows: list[tuple[Any, ...]] = []
    for task in result.tasks:
        error = "" if task.stderr is None else f"{1.96 * task.stderr:.3f}"
        rows.append((task.task, task.metric, task.value, error, f"{task.num_samples}"))
        if task.mean_answer_tokens is not None:
            rows.append(("", "tokens per answer", f"{task.mean_answer_tokens:.1f}", "", ""))
        rows += [("", name, value, "", "") for name, value in task.others.items()]
    for rate in result.behaviour:
        rows.append(("behaviour", rate.task, rate.value, f"{1.96 * (rate.stderr or 0):.3f}", f"{rate.num_samples}"))
    for text in result.perplexity:
        rows.append((text.data, f"perplexity ({text.through})", text.perplexity, "", counted(text.num_tokens, "token")))
    numbers = Column("value", "{:.4f}".format), Column("±", str), Column("items", str)
    return Table(columns=(Column("task"), Column("metric"), *numbers), rows=tuple(rows))
