"""All files of one report, written beside each other, and `report.json` read back.

The schema of `report.json` is docs/report.schema.json. Numbers that JSON cannot say (infinite, not a number) become
null. `metrics` repeats the numbers that gates can be about under their names there, for readers with `jq`; it is
computed, and ignored when a report is read back.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from quantkit.errors import ReportError, located
from quantkit.quantities import number
from quantkit.report.markdown import render_markdown
from quantkit.report.page import render_html
from quantkit.report.tables import VERDICTS, recovery_text
from quantkit.results import Report
from quantkit.results.gates import gate_numbers
from quantkit.safety.untrusted import read_object


def dumps(report: Report) -> str:
    """A report as JSON text; equal reports give equal bytes."""
    document = {**report.to_dict(), "metrics": gate_numbers(report)}
    # `NaN` is no JSON, and strict readers refuse the whole document because of it.
    return json.dumps(json_ready(document), ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def read_report(path: Path | str) -> Report:
    """The report in a file, or in a checkpoint's directory.

    Raises:
        ReportError: no such file, not JSON, of another version, or not a report.
    """
    path = Path(path)
    file = path / "report.json" if path.is_dir() else path
    if not file.exists():
        todo = f"`quantkit verify {path}` makes one" if path.is_dir() else "give a checkpoint's directory or its report"
        raise ReportError(f"{file}: no such file; {todo}")
    data = read_object(file, ReportError, "is it cut short, or no report?")
    with located(str(file)):
        return Report.from_dict(data)


def json_ready(value: Any) -> Any:
    """Return the value with null for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    return [json_ready(item) for item in value] if isinstance(value, list | tuple) else value


def render_junit(report: Report) -> str:
    """Gates and comparisons of a report as test suites."""
    root = ElementTree.Element("testsuites", name=f"quantkit verify {report.model.name}")
    _gates(root, report)
    _comparisons(root, report)
    suites = list(root)
    for key in ("tests", "failures"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _gates(root: ElementTree.Element, report: Report) -> None:
    failed = sum(not gate.held for gate in report.gates)
    suite = ElementTree.SubElement(root, "testsuite", name="gates", tests=str(len(report.gates)), failures=str(failed))
    for gate in report.gates:
        case = ElementTree.SubElement(suite, "testcase", classname="quantkit.results.gates", name=gate.gate)
        if not gate.held:
            failure = ElementTree.SubElement(case, "failure", message=gate.explanation, type="gate")
            failure.text = gate.remedy
        else:
            ElementTree.SubElement(case, "system-out").text = gate.explanation


def _comparisons(root: ElementTree.Element, report: Report) -> None:
    count = str(len(report.comparisons))
    suite = ElementTree.SubElement(root, "testsuite", name="comparisons", tests=count, failures="0")
    for comparison in report.comparisons:
        case = ElementTree.SubElement(suite, "testcase", classname="quantkit.comparisons", name=comparison.subject)
        values = f"{comparison.metric}: {number(comparison.baseline, 4)} before, {number(comparison.value, 4)} now"
        text = f"{values}; recovery {recovery_text(comparison)}; {VERDICTS[comparison.verdict]}"
        ElementTree.SubElement(case, "system-out").text = text


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
