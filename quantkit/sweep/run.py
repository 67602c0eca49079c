"""Run every recipe on every model: one trial compresses and verifies each pair, and a page compares the results.

All output is in one folder, which every worker must be able to read and write:

    <model>-<recipe>/    the checkpoint with its report
    trials/<name>.json   the record of the trial: its settings and, once it has ended, its outcome
    trials/<name>.log    the log of the trial
    sweep.html           the comparison

Running a sweep again continues it if it was interrupted; recipes and models may be added to a finished sweep.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.reader import CheckpointReader, file_digest
from quantkit.compress.pipeline.state import calibration_digest, describe_versions, refuse_changes
from quantkit.compress.recipe import Recipe
from quantkit.errors import InputError, ReportError, ResumeError
from quantkit.machine.system import available_cores
from quantkit.output.staging import check_checkpoint
from quantkit.output.work_folder import work_folder
from quantkit.output.writer import write_json, write_text
from quantkit.report.compare import CheckpointComparison, compare_reports, render_comparisons
from quantkit.report.files import json_ready, read_report
from quantkit.results import TrialRecord
from quantkit.safety.untrusted import read_object
from quantkit.sweep.trials import Outcome, Trial, TrialCommand, check_place, planned_bytes, quantize_command, run_trials

DEMO = "demo"
_REMEDY = "delete this file, and the checkpoint with the same name"
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """Options of a sweep.

    Args:
        output: folder for all output of the sweep.
        on, jobs: see `quantkit.sweep.trials.run_trials`.
        threads: threads of each trial; None = as in an earlier run of the sweep. In the first run, None = this
            machine's cores / `jobs`.
        device: "auto", "cpu" or "cuda".
        verify: further arguments for `quantkit verify`.
        resume: reuse finished trials in the folder; False = run the trials of this call again, and do not change
            other trials.
    """

    output: Path
    on: str = "local"
    jobs: int = 1
    threads: int | None = None
    device: str = "auto"
    verify: tuple[str, ...] = ()
    resume: bool = True


def sweep(
    recipes: Sequence[Recipe], models: Sequence[str], options: SweepOptions, *, progress: Progress = lambda _: None
) -> tuple[TrialRecord, ...]:
    """Run every recipe on every model.

    Args:
        recipes: recipes with different names.
        models: directories or hub ids; "demo" = the bundled model.
        options: options of the sweep.
        progress: called with one line per event.
    Returns:
        One record per pair of model and recipe, model by model. The record of a failed trial gives the reason.
    Raises:
        InputError: a model does not exist, two trials have the same name, or `on` is not a valid place.
        ResumeError: the folder has a trial of the same name with other settings.
    """
    check_place(options.on)
    folders = {model: resolve(None if model == DEMO else model) for model in dict.fromkeys(models)}
    with work_folder(options.output, "sweep") as work:
        (work.path / "trials").mkdir(exist_ok=True)
        return _Sweep(recipes=recipes, folders=folders, options=options, progress=progress).run()


def compare_trials(records: Iterable[TrialRecord]) -> dict[str, CheckpointComparison]:
    """Compare the trials that have reports, separately for each model: figures of two models are not comparable."""
    reports: dict[str, list[Any]] = {}
    for record in records:
        if record.report is not None:
            reports.setdefault(record.model, []).append(record.report)
    return {model: compare_reports(of_model) for model, of_model in reports.items()}


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """All trials of one sweep."""

    recipes: Sequence[Recipe]
    folders: Mapping[str, Path]
    options: SweepOptions
    progress: Progress

    def run(self) -> tuple[TrialRecord, ...]:
        """Run the trials that are not done, and write the page that compares all trials."""
        records = {record.name: record for record in self._planned()}
        left = [record for record in records.values() if record.report is None]
        if len(left) < len(records):
            self.progress(f"reusing {len(records) - len(left)} of {len(records)} trials in {self._folder}")
        trials = [self._trial(record) for record in left]
        for record in left:
            self._write(record)
        with closing(run_trials(trials, self.options.on, self.options.jobs)) as outcomes:
            for number, outcome in enumerate(outcomes, start=len(records) - len(left) + 1):
                records[outcome.name] = self._finished(records[outcome.name], outcome)
                self._write(records[outcome.name])
                said = outcome.reason or f"done in {outcome.seconds:.0f} s"
                self.progress(f"{outcome.name}: {said} ({number} of {len(records)})")
        self._write_page(records.values())
        return tuple(records.values())

    def _planned(self) -> list[TrialRecord]:
        """Return a record for each pair of model and recipe: the saved record, or a new one."""
        kept = {path.stem: _read(path) for path in sorted((self._folder / "trials").glob("*.json"))}
        threads = self.options.threads or next((old.identity.get("threads") for old in kept.values()), None)
        threads = threads or max(1, available_cores() // self.options.jobs)
        identities = {
            model: {"threads": threads, "model": CheckpointReader(path).digests} for model, path in self.folders.items()
        }
        planned = [self._record(model, recipe, of) for model, of in identities.items() for recipe in self.recipes]
        names = [record.name for record in planned]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"two trials would both be named {twice!r}; rename a recipe or a model folder")
        if not self.options.resume:
            self._forget(names)
            return planned
        return [self._taken_over(record, kept.get(record.name)) for record in planned]

    def _forget(self, names: Sequence[str]) -> None:
        """Delete the outputs of the trials with these names, and nothing else.

        Raises:
            OutputError: a folder with one of these names is not the output of a trial; nothing is deleted.
        """
        made = [self._folder / name for name in names if os.path.lexists(self._folder / name)]
        for checkpoint in made:
            check_checkpoint(checkpoint)
        for checkpoint in made:
            shutil.rmtree(checkpoint)
        for name in names:
            for kind in ("json", "log"):
                (self._folder / "trials" / f"{name}.{kind}").unlink(missing_ok=True)

    @cached_property
    def _folder(self) -> Path:
        return self.options.output.resolve()

    def _record(self, model: str, recipe: Recipe, identity: dict[str, Any]) -> TrialRecord:
        return TrialRecord(
            name=f"{self._short_name(model)}-{recipe.name}",
            model=model,
            recipe=recipe.name,
            identity={
                **identity,
                "recipe": {**recipe.source, "gates": list(recipe.gates)},
                "calibration": calibration_digest(recipe),
                "device": self.options.device,
                "verify": list(self.options.verify),
                "asked": {word: file_digest(Path(word)) for word in self.options.verify if Path(word).is_file()},
                "versions": describe_versions(),
            },
        )

    def _short_name(self, model: str) -> str:
        """Return the name of a model's folder, or of its repository on the hub without the owner."""
        here = Path(model).expanduser()
        return model if model == DEMO else here.resolve().name if here.exists() else model.rpartition("/")[2]

    def _taken_over(self, record: TrialRecord, kept: TrialRecord | None) -> TrialRecord:
        is_made = (self._folder / record.name).exists()
        if kept is None and is_made:
            raise ResumeError(
                f"{self._folder / record.name} exists, but no record says how it was made; move it away, or start "
                "over with --no-resume"
            )
        if kept is None or (kept.report is None and not is_made):
            return record
        what = f"trial {record.name} of {self._folder}"
        refuse_changes(kept.identity, json_ready(record.identity), what, "give another --output, or --no-resume")
        return record if kept.report is None else kept

    def _trial(self, record: TrialRecord) -> Trial:
        """Return the trial of a record, and write its recipe to a file."""
        folder, checkpoint = self._folder / "trials", self._folder / record.name
        recipe = folder / record.name / f"{record.recipe}.yaml"
        recipe.parent.mkdir(exist_ok=True)
        write_json(recipe, record.identity["recipe"])  # JSON is YAML
        model, device = None if record.model == DEMO else record.model, self.options.device
        threads = record.identity["threads"]
        anew = () if self.options.resume else ("--no-resume",)
        baseline = () if model is None else ("--baseline", model)
        how = ("--no-sensitivity", "--threads", str(threads), "--device", device, *self.options.verify)
        verify = TrialCommand(arguments=("verify", str(checkpoint), *baseline, *how), made=checkpoint / "report.json")
        return Trial(
            name=record.name,
            commands=(quantize_command(model, recipe, checkpoint, device, *anew), verify),
            log=folder / f"{record.name}.log",
            threads=threads,
            device=device,
            num_bytes=planned_bytes(model, recipe),
        )

    def _finished(self, record: TrialRecord, outcome: Outcome) -> TrialRecord:
        known = {name: getattr(outcome, name) for name in ("exit_code", "reason", "attempts", "seconds")}
        report = read_report(self._folder / record.name) if outcome.exit_code == 0 else None
        return replace(record, **known, report=report)

    def _write(self, record: TrialRecord) -> None:
        write_json(self._folder / "trials" / f"{record.name}.json", json_ready(record.to_dict()))

    def _write_page(self, records: Iterable[TrialRecord]) -> None:
        """Write the page that compares the trials, if any trial has a report and the packages for charts are there."""
        compared = compare_trials(records)
        missing = [f"{record.name} has no results: {record.reason}." for record in records if record.report is None]
        if compared:
            try:
                write_text(self._folder / "sweep.html", render_comparisons(compared, missing))
            except ReportError as error:
                self.progress(f"warning: {error}")


def _read(path: Path) -> TrialRecord:
    try:
        return TrialRecord.from_dict(read_object(path, ResumeError, _REMEDY))
    except ReportError as error:
        raise ResumeError(f"{path} is damaged ({error}); {_REMEDY}") from error
