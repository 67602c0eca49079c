"""Progress of a compression on stderr: a bar on a terminal, one line per layer elsewhere, nothing if not wanted."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from typing_extensions import Self

from quantkit.cli._errors import say
from quantkit.cli._output import Output, plain_console
from quantkit.quantities import byte_size, elapsed

if TYPE_CHECKING:
    from quantkit.results import LayerRecord

__all__ = ["Bar", "Log", "Progressing", "for_output"]


class Progressing:
    """The listener that shows nothing, and the frame of those that do; a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def plan(self, summary: dict[str, Any]) -> None:
        """What is about to happen."""

    def layer_started(self, index: int, name: str) -> None:
        """A layer begins."""

    def phase(self, name: str) -> None:
        """The layer enters a phase."""

    def layer_finished(self, record: LayerRecord) -> None:
        """A layer is on disk."""

    def warning(self, text: str) -> None:
        """Something that the user should know."""


class Log(Progressing):
    """One plain line per layer, for files and pipes."""

    def __init__(self) -> None:
        self._total = self._first = self._done = 0
        self._start_s = time.monotonic()

    def plan(self, summary: dict[str, Any]) -> None:
        """The plan in one line."""
        self._total, self._first = _num(summary, "num_layers"), _num(summary, "resumed_layers")
        say(plan_line(summary))
        self._start_s = time.monotonic()

    def layer_finished(self, record: LayerRecord) -> None:
        """The layer's worst error, its time, the memory in use and the time left."""
        self._done += 1
        left = (self._total - self._first - self._done) * (time.monotonic() - self._start_s) / self._done
        parts = [worst_error(record), elapsed(sum(record.seconds.values())), byte_size(memory_in_use())]
        if left > 0:
            parts.append(f"{elapsed(left)} left")
        say(f"layer {record.index + 1}/{self._total} {record.name}: {', '.join(filter(None, parts))}")

    def warning(self, text: str) -> None:
        """The warning in one line."""
        say(f"warning: {text}")


class Bar(Progressing):
    """A bar that names the layer and its phase, the time left and the memory in use."""

    def __init__(self, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[memory]}", markup=False),
            console=console or plain_console(stderr=True),
            transient=True,
        )
        self._task: TaskID | None = None
        self._layer = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def plan(self, summary: dict[str, Any]) -> None:
        """The plan above the bar, and the bar at the layers that are done already."""
        self._bar.console.print(plan_line(summary))
        self._task = self._bar.add_task(
            "starting", total=_num(summary, "num_layers"), completed=_num(summary, "resumed_layers"), memory=""
        )

    def layer_started(self, index: int, name: str) -> None:
        """The layer's name before the bar."""
        self._layer = name
        self._show(name)

    def phase(self, name: str) -> None:
        """The phase after the layer's name."""
        self._show(f"{self._layer} {name}".strip())

    def layer_finished(self, record: LayerRecord) -> None:
        """One step further."""
        if self._task is not None:
            self._bar.advance(self._task)
        self._show(record.name)

    def warning(self, text: str) -> None:
        """The warning above the bar."""
        self._bar.console.print(f"warning: {text}", style="yellow")

    def _show(self, description: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, description=description, memory=byte_size(memory_in_use()))


def for_output(output: Output) -> Progressing:
    """The listener that suits the options and the terminal."""
    if not output.shows_progress:
        return Progressing()
    return Bar() if sys.stderr.isatty() else Log()


def plan_line(summary: dict[str, Any]) -> str:
    """The plan of a run as one line; what the summary lacks is left out.

    Args:
        summary: as given to `Listener.plan`.
    """
    parts = [f"{_num(summary, 'num_layers')} layers"]
    if resumed := _num(summary, "resumed_layers"):
        parts.append(f"{resumed} taken over from an interrupted run")
    if samples := _num(summary, "samples"):
        parts.append(f"{samples} samples")
    if predicted := _num(summary, "predicted_bytes"):
        parts.append(f"about {byte_size(predicted)} of memory at the highest")
    return "plan: " + ", ".join(parts)


def worst_error(record: LayerRecord) -> str:
    """`worst error 0.031 (mlp.down_proj)` of a layer, or an empty string when nothing in it was quantized."""
    if not record.linears:
        return ""
    worst = max(record.linears, key=lambda linear: linear.error)
    return f"worst error {worst.error:.4f} ({worst.name})"


def memory_in_use() -> int:
    """Resident bytes of this process now; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _num(summary: dict[str, Any], key: str) -> int:
    return int(summary.get(key) or 0)
