"""The report's files, and the name of a checkpoint that failed."""

from dataclasses import replace
from pathlib import Path

from quantkit.errors import OutputError
from quantkit.output.staging import open_stage
from quantkit.output.writer import writing
from quantkit.report.files import write_report
from quantkit.results import Report


def write_files(report: Report, directory: Path) -> tuple[dict[str, Path], str]:
    """All files of a report.

    Args, Returns:
        see `write_report`.
    Raises:
        OutputError, ResourceError: the place cannot be written.
    """
    with writing(directory):
        return write_report(report, directory)


def set_aside(report: Report, path: Path) -> tuple[Report, Path]:
    """Give a checkpoint that failed another name, `<path>.failed`, in place of an earlier failure of that name.

    Args:
        report: about it.
        path: its directory.
    Returns:
        the report under the new name, and the new directory.
    Raises:
        OutputError: there is something of that name that is no checkpoint, or it cannot be renamed.
    """
    target = path.with_name(f"{path.name}.failed")
    try:
        with open_stage(target, "quantize --verify", overwrite=True) as stage:
            stage.promote(path)
    except OutputError as error:
        raise OutputError(f"{path} failed and should become {target}: {error}") from error
    return replace(report, model=replace(report.model, name=target.name, path=str(target))), target
