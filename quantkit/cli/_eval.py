"""What `quantkit eval` shows people: one table of a model's numbers, or one of differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.report.table import Table
    from quantkit.results import EvaluationResult


def settings_line(result: EvaluationResult) -> str:
    """What decided the numbers."""
    told = {"model": result.model, "computed in": result.arithmetic, **result.settings}
    return " · ".join(f"{name} {value}" for name, value in told.items() if value)


def result_table(result: EvaluationResult) -> Table:
    """One row per task and text."""
    from quantkit.report.table import Column, Table

    rows: list[tuple[Any, ...]] = []
    for task in result.tasks:
        error = "" if task.stderr is None else f"{1.96 * task.stderr:.3f}"
        rows.append((task.task, task.metric, task.value, error, f"{task.num_samples}"))
        if task.mean_answer_tokens is not None:
            rows.append(("", "tokens per answer", f"{task.mean_answer_tokens:.1f}", "", ""))
        rows += [("", name, value, "", "") for name, value in task.others.items()]
    for text in result.perplexity:
        rows.append((text.data, f"perplexity ({text.through})", text.perplexity, "", f"{text.num_tokens} tokens"))
    numbers = Column("value", "{:.4f}".format), Column("±", str), Column("items", str)
    return Table(columns=(Column("task"), Column("metric"), *numbers), rows=tuple(rows))
