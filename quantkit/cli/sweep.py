"""`quantkit sweep`: compress and verify every model with every recipe, and compare the results in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.bit_search.options import SearchOptions
from quantkit.cli._options import RUN, Settings, as_arguments, option_group, set_option, settings_of
from quantkit.cli._output import Command, Output, say
from quantkit.cli.verify import ASKED, check_before, verify_options
from quantkit.evaluate.options import EvaluationOptions
from quantkit.report.table import Column, Table
from quantkit.runtime.config import EngineConfig
from quantkit.settings import setting

if TYPE_CHECKING:
    from quantkit.compress.recipe import Recipe
    from quantkit.report.compare import CheckpointComparison
    from quantkit.results import TrialRecord

_VERIFY: Settings = {
    **settings_of(EvaluationOptions, *ASKED),
    "text": setting(None, "Text on which the distributions of both models are compared.", flag="--text FILE"),
    "bench": setting(True, "Time both models.", flag="--bench/--no-bench", shown="bench"),
    **settings_of(EngineConfig, "dtype", "kv_cache"),
}
_HOW: Settings = {
    "output": setting(Path("sweep"), "Folder for all output.", flag="-o --output DIR", kind=Path),
    **settings_of(SearchOptions, "on", "jobs"),
    **settings_of(EngineConfig, "device"),
    "threads": setting(None, "CPU threads of each trial.", flag="--threads", minimum=1, shown="cores / --jobs"),
    "resume": RUN["resume"],
}


@click.command("sweep", cls=Command, short_help="Compress and verify several models with several recipes.")
@click.argument("recipes")
@click.argument("models", default="demo")
@option_group("how", _HOW)
@set_option
@option_group("verify", _VERIFY)
def command(
    output_to: Output,
    *,
    recipes: str,
    models: str,
    how: dict[str, Any],
    changes: tuple[str, ...],
    verify: dict[str, Any],
) -> None:
    """Compress each of MODELS with each of RECIPES, and verify the results. Separate names with commas; `demo` is the
    bundled model.

    Each pair of a model and a recipe is a trial, which runs in its own process on this machine, or as a Ray task.
    Finished trials are kept, so the same command continues where it stopped. If a trial fails, a table shows the
    reason, and the sweep ends with the trial's exit code.

    \b
    Examples:
      quantkit sweep rtn-int4,gptq-int4,awq-int4
      quantkit sweep gptq-int4,awq-int4 demo,./my-model --jobs 2 -o compared
      quantkit sweep gptq-int4,awq-int4 --on ray --no-bench
    """
    from quantkit.sweep.run import SweepOptions, compare_trials, sweep

    asked = [_recipe(name, changes) for name in _listed(recipes)]
    _check_before(asked, changes, verify)
    options = SweepOptions(**{"output": Path("sweep"), **how}, verify=tuple(as_arguments(_VERIFY, verify)))
    records = sweep(asked, _listed(models), options, progress=output_to.tell)
    compared = compare_trials(records)
    failed = [record for record in records if record.report is None]
    output_to.result(
        _numbers(records, compared, options.output),
        *_tables(compared),
        _failures(failed) if failed else None,
        f"all output is in {options.output}",
    )
    if failed:
        say(f"error: {len(failed)} of {len(records)} trials failed; the first is {failed[0].name}: {failed[0].reason}")
        codes = {record.exit_code for record in failed}
        click.get_current_context().exit(1 if 1 in codes else max(codes))  # 1, a bug, is the most serious


def _check_before(recipes: Sequence[Recipe], changes: Sequence[str], verify: Mapping[str, Any]) -> None:
    """Refuse settings that trials would refuse after hours of compressing, or that no trial would use."""
    from quantkit.evaluate.verify.options import check_options

    if all(recipe.calibration is None for recipe in recipes):
        ignored = next((change for change in changes if change.startswith("calibration.")), None)
        if ignored is not None:
            raise click.UsageError(
                f"--set {ignored}: none of these recipes uses calibration data; leave this --set out"
            )
    for recipe in recipes:
        check_before(recipe, None)
    asked = {name: verify[name] for name in ASKED if name in verify}
    engine = {name: verify[name] for name in ("dtype", "kv_cache") if name in verify}
    check_options(verify_options(asked, engine, text=verify.get("text"), bench=False))


def _recipe(name: str, changes: Sequence[str]) -> Recipe:
    """Load a recipe with changes. Changes of calibration fields apply only if the recipe uses calibration data."""
    from quantkit.compress.recipe import load

    reads_data = load(name).calibration is not None
    return load(name, [change for change in changes if reads_data or not change.startswith("calibration.")])


def _listed(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise click.UsageError(f"{text!r} contains no name; give one name, or several separated by commas")
    return list(dict.fromkeys(names))


def _tables(compared: Mapping[str, CheckpointComparison]) -> list[Table | str]:
    from dataclasses import replace

    from quantkit.report.compare import checkpoints_table, comparison_sentence

    shown: list[Table | str] = []
    for model, comparison in compared.items():
        table = replace(checkpoints_table(comparison), title=f"{model}, smallest first")
        shown += [table, comparison_sentence(comparison)]
    return shown


def _failures(failed: Sequence[TrialRecord]) -> Table:
    return Table(
        title="trials that failed",
        columns=(Column("trial"), Column("exit code", str), Column("reason")),
        rows=tuple((record.name, record.exit_code, record.reason) for record in failed),
    )


def _numbers(
    records: Sequence[TrialRecord], compared: Mapping[str, CheckpointComparison], output: Path
) -> dict[str, Any]:
    """Return the object that --json prints, without the reports, which are stored with the checkpoints."""
    from dataclasses import asdict

    from quantkit.report.files import json_ready
    from quantkit.results.gates import gate_numbers

    alike = ("name", "model", "recipe", "exit_code", "reason", "attempts", "seconds")
    rows = [
        {
            **{name: getattr(record, name) for name in alike},
            "metrics": None if record.report is None else gate_numbers(record.report),
            "num_bytes": None if record.report is None else record.report.model.num_bytes,
        }
        for record in records
    ]
    fronts = {model: asdict(comparison) for model, comparison in compared.items()}
    numbers: dict[str, Any] = json_ready({"trials": rows, "compared": fronts, "output": str(output)})
    return numbers
