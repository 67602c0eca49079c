"""Record of one trial of a sweep: a recipe on a model, with its report or the reason why there is none. Torch-free."""

from dataclasses import dataclass
from typing import Any

from quantkit.results._record import Record
from quantkit.results.report import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord(Record):
    """One recipe on one model.

    Args:
        name: of the trial, and of its checkpoint.
        model: as given, "demo" for the bundled one.
        recipe: its name.
        identity: everything that decides its figures but times.
        exit_code: of the command that ended it; 0 = done, 130 = not finished.
        reason: why there is no report.
        attempts: how often it was begun.
        seconds: wall time of the last attempt.
        report: about its checkpoint.
    """

    name: str
    model: str
    recipe: str
    identity: dict[str, Any]
    exit_code: int = 130
    reason: str = "not finished"
    attempts: int = 0
    seconds: float = 0.0
    report: Report | None = None
