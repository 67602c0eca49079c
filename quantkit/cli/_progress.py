"""Show the progress of a compression on stderr: a bar on a terminal, otherwise one line per layer."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quantkit.cli._output import Output, plain_console, say
from quantkit.compress.pipeline.state import SILENT, Listener
from quantkit.machine.system import resident_bytes
from quantkit.quantities import byte_size, counted, elapsed
from quantkit.report.table import printable
from quantkit.results import LayerRecord


class Log(Listener):
    """Prints one plain line per layer, for files and pipes."""

    def __init__(self) -> None:
        self._total = self._first = self._done = 0
        self._start_s = time.monotonic()

    def plan(self, summary: dict[str, Any]) -> None:
        self._total, self._first = _num(summary, "num_layers"), _num(summary, "resumed_layers")
        say(plan_line(summary))
        self._start_s = time.monotonic()

    def layer_finished(self, record: LayerRecord) -> None:
        """Print the layer's worst error, its time, the memory in use and the time left."""
        self._done += 1
        # Layers reused from an earlier run took no time in this run.
        left = (self._total - self._first - self._done) * (time.monotonic() - self._start_s) / self._done
        parts = [worst_error(record), elapsed(sum(record.seconds.values())), byte_size(resident_bytes())]
        if left > 0:
            parts.append(f"{elapsed(left)} left")
        say(f"layer {record.index + 1}/{self._total} {record.name}: {', '.join(filter(None, parts))}")

    def note(self, text: str) -> None:
        say(f"note: {text}")

    def warning(self, text: str) -> None:
        say(f"warning: {text}")


class Bar(Listener):
    """Shows a bar with the layer, its phase, the time left and the memory in use."""

    def __init__(self, console: Console | None = None) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[memory]}", markup=False),
            console=console or plain_console(stderr=True),
            transient=True,
        )
        # The plan gives the number of layers; until then nothing is shown.
        self._task = self.progress.add_task("starting", visible=False, memory="")
        self._layer = ""

    def plan(self, summary: dict[str, Any]) -> None:
        self.progress.console.print(plan_line(summary))
        total, completed = _num(summary, "num_layers"), _num(summary, "resumed_layers")
        self.progress.update(self._task, total=total, completed=completed, visible=True)

    def layer_started(self, index: int, name: str) -> None:
        self._layer = name
        self._show(name)

    def phase(self, name: str) -> None:
        self._show(f"{self._layer} {name}".strip())

    def layer_finished(self, record: LayerRecord) -> None:
        self.progress.advance(self._task)
        self._show(record.name)

    def note(self, text: str) -> None:
        self.progress.console.print(printable(f"note: {text}"))

    def warning(self, text: str) -> None:
        self.progress.console.print(printable(f"warning: {text}"), style="yellow")

    def _show(self, description: str) -> None:
        self.progress.update(self._task, description=printable(description), memory=byte_size(resident_bytes()))


@contextmanager
def listening(output: Output) -> Iterator[Listener]:
    """Yield a listener that shows progress: a bar on a terminal, otherwise lines; nothing with --quiet or --json."""
    if output.shows_progress and sys.stderr.isatty():
        bar = Bar()
        with bar.progress:
            yield bar
    else:
        yield Log() if output.shows_progress else SILENT


def plan_line(summary: dict[str, Any]) -> str:
    """Format the plan of a run as one line; values that the summary lacks are left out.

    Args:
        summary: the summary that `Listener.plan` receives.
    """
    parts = [counted(_num(summary, "num_layers"), "layer")]
    if resumed := _num(summary, "resumed_layers"):
        parts.append(f"{resumed} reused from an interrupted run")
    if samples := _num(summary, "samples"):
        parts.append(counted(samples, "sample"))
    if predicted := _num(summary, "predicted_bytes"):
        parts.append(f"about {byte_size(predicted)} of memory at the peak")
    return "plan: " + ", ".join(parts)


def worst_error(record: LayerRecord) -> str:
    """Format the worst error of a layer as `worst error 0.031 (mlp.down_proj)`; "" if nothing in it was quantized."""
    if not record.linears:
        return ""
    worst = max(record.linears, key=lambda linear: linear.error)
    return f"worst error {worst.error:.4f} ({worst.name})"


def _num(summary: dict[str, Any], key: str) -> int:
    return int(summary.get(key) or 0)


def showing_layers(output_to: Output) -> Any:
    """Return a function that shows the current layer as `12/32 NAME`.

    On a terminal, it overwrites the previous line; elsewhere, it prints a line every 10 seconds.
    """
    shown_s = time.monotonic()

    def show(done: int, total: int, name: str) -> None:
        nonlocal shown_s
        if not output_to.shows_progress:
            return
        if sys.stderr.isatty():
            # `\x1b[K` erases the rest of the line, because the previous name may have been longer.
            click.echo(f"\r{done}/{total} {name}\x1b[K" + ("\n" if done == total else ""), nl=False, err=True)
        elif time.monotonic() - shown_s >= 10:  # in a file, a carriage return erases nothing
            shown_s = time.monotonic()
            say(f"{done}/{total} {name}")

    return show
