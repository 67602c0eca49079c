"""All files of one report, written beside each other."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantkit.errors import ReportError
from quantkit.report.html import render_html
from quantkit.report.json import dumps
from quantkit.report.junit import render_junit
from quantkit.report.markdown import render_markdown
from quantkit.results import Report

# By name, words that every such file of quantkit's has near its beginning.
SIGNS = {
    "report.json": '"bits_per_weight"',
    "junit.xml": 'testsuites name="quantkit ',
    "README.md": "with quantkit",
    "report.html": '<meta name="generator" content="quantkit">',
}


def write_report(report: Report, directory: Path | str) -> tuple[dict[str, Path], str]:
    """Write `report.json`, `junit.xml`, the model card `README.md`, and last the page `report.html`.

    Args:
        report: what was measured.
        directory: made if it is not there.
    Returns:
        file by kind ("json", "junit", "card", "html"), and why there is no page: it needs packages that not everybody
        has; empty where it was written.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        files = {
            "json": _write(directory / "report.json", dumps(report)),
            "junit": _write(directory / "junit.xml", render_junit(report)),
            "card": _write(directory / "README.md", render_markdown(report)),
        }
        # The page comes last, because it alone may fail for want of a package.
        try:
            return {**files, "html": _write(directory / "report.html", render_html(report))}, ""
        except ReportError as error:
            return files, str(error)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Another process that writes its report there waits, so that files of two reports do not mix."""
    # The directory itself is locked, so that no lock file stays in a checkpoint.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> Path:
    """Whole or not at all: a reader never sees half a file."""
    # In the same directory: a rename is atomic within one file system only.
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)
