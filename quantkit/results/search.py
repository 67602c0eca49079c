"""Records of a search for the bits of each fused group, and of the trials of a sweep. Torch-free."""

from dataclasses import dataclass
from typing import Any

from quantkit.results._record import Record
from quantkit.results.report import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateRecord(Record):
    """One way to store weights, and the model that is stored so throughout.

    Args:
        name: e.g. "int4:32", or "skip" for weights ignored.
        bits_per_weight: stored bits, scales included, if every group took it.
        sum_kl: what the groups do one at a time, added up.
    """

    name: str
    bits_per_weight: float
    sum_kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChoice(Record):
    """Choice for one fused group.

    Args:
        layer: index of the decoder layer.
        group: e.g. "q/k/v", "o", "gate/up", "down".
        modules: full names of its linears.
        num_weights: in it.
        choice: name of the candidate.
        bits_per_weight: stored bits, scales included.
        kl: mean KL to the original with only this group stored so, nats per token.
    """

    layer: int
    group: str
    modules: tuple[str, ...]
    num_weights: int
    choice: str
    bits_per_weight: float
    kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult(Record):
    """Result of `quantkit search`.

    Args:
        model: as given, "demo" for the bundled one.
        recipe: file that was written.
        base: name of the recipe that it started from.
        target: e.g. "bits<=4.5", "kl<=0.02", "recovery>=99".
        reached: whether the measured model meets it.
        bits_per_weight: stored bits, scales and zero points included, over all linears that the search may change;
            those it ignores count as stored.
        output_bytes: of all tensors of the compressed model.
        candidates: what each fused group could be given.
        groups: what each was given.
        data: name of the text.
        num_tokens: positions that sensitivities were measured on, and about as many for what was expected and measured.
        sum_kl: of the groups as chosen, one at a time, added up.
        search_kl: of all of them together, on the tokens that they were chosen on: lower than on others.
        expected_kl: the same on tokens that the search has not used, before anything was compressed by the recipe.
        measured_kl: of the model compressed by the recipe, on the tokens of `expected_kl`.
        recovery: per cent of the original's task scores, where that was the target.
        notes: what is out of the ordinary.
        seconds: wall time of this process.
    """

    model: str
    recipe: str
    base: str
    target: str
    reached: bool
    bits_per_weight: float
    output_bytes: int
    candidates: tuple[CandidateRecord, ...]
    groups: tuple[GroupChoice, ...]
    data: str
    num_tokens: int
    sum_kl: float
    search_kl: float
    expected_kl: float
    measured_kl: float
    recovery: float | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def prediction_error(self) -> float:
        """Expected over measured KL, less one."""
        return self.expected_kl / self.measured_kl - 1 if self.measured_kl > 0 else 0.0


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
