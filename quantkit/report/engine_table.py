"""Which engines read a checkpoint, as a table."""

from collections.abc import Sequence

from quantkit.report.table import Column, Table
from quantkit.results import EngineReading

NOTE = "By the rules of these releases, read from their sources; GPUs were not at hand."


def engine_table(title: str, readings: Sequence[EngineReading]) -> Table | None:
    """Each engine at its release, how it reads, and why; None where nothing is known.

    Args:
        title: heading of the first column.
        readings: of the engines.
    """
    if not readings:
        return None
    return Table(
        columns=(Column(title), Column("reads"), Column("by, or why not")),
        rows=tuple(
            (
                f"{reading.engine} {reading.release}",
                reading.reads,
                "; ".join(filter(None, (reading.reason, reading.cache))),
            )
            for reading in readings
        ),
        note=NOTE,
    )
