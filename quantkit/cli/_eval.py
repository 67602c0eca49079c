"""What `quantkit eval` shows people: one table of a model's numbers, or one of differences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from quantkit.results import Comparison, EvaluationResult


def progress(name: str) -> Callable[[str], None]:
    """Tells on stderr what is going on; to the stderr of now, while lm-eval's own is kept away."""
    stream = sys.stderr
    return lambda text: click.echo(f"{name}: {text}", file=stream)


def settings_line(result: EvaluationResult) -> Text:
    """What decided the numbers."""
    from rich.text import Text

    told = {"model": result.model, "computed in": result.arithmetic, **result.settings}
    return Text(" · ".join(f"{name} {value}" for name, value in told.items() if value))


def result_table(result: EvaluationResult) -> Table:
    """One row per task and text."""
    table = _table(["task", "metric", "value", "±", "items"], text=2)
    for task in result.tasks:
        error = "" if task.stderr is None else f"{1.96 * task.stderr:.3f}"
        table.add_row(task.task, task.metric, f"{task.value:.4f}", error, f"{task.num_samples}")
        if task.mean_answer_tokens is not None:
            table.add_row("", "tokens per answer", f"{task.mean_answer_tokens:.1f}", "", "")
        for name, value in task.others.items():
            table.add_row("", name, f"{value:.4f}", "", "")
    for text in result.perplexity:
        metric = f"perplexity ({text.through})"
        table.add_row(text.data, metric, f"{text.perplexity:.4f}", "", f"{text.num_tokens} tokens")
    return table


def comparison_table(compared: Sequence[Comparison], baseline: EvaluationResult) -> Group:
    """One row per number that both have."""
    from rich.console import Group
    from rich.text import Text

    table = _table(["", "metric", "baseline", "model", "difference (95 %)", "recovery %", "p", "verdict"], text=2)
    for item in compared:
        interval = "" if item.low is None or item.high is None else f" ({item.low:+.3f} to {item.high:+.3f})"
        table.add_row(
            *(item.subject, item.metric, f"{item.baseline:.4f}", f"{item.value:.4f}"),
            f"{item.difference:+.4f}{interval}",
            "" if item.recovery is None else f"{item.recovery:.1f}",
            "" if item.p_value is None else f"{item.p_value:.3f}",
            item.verdict,
        )
    return Group(Text(f"against {baseline.model} in {baseline.arithmetic}"), table)


def _table(columns: Sequence[str], *, text: int) -> Table:
    """A table whose first `text` columns are words and the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < text else "right", overflow="fold")
    return table
