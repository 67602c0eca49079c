"""`report.json`: a report as one JSON document; the schema that it keeps is docs/report.schema.json.

Numbers that JSON cannot say (infinite, not a number) become null. `metrics` repeats what gates can be about under the
names that gates use, for readers with `jq`; it is computed, and ignored when a report is read back.
"""

import json
import math
from pathlib import Path
from typing import Any

from quantkit.errors import ReportError, located
from quantkit.results import Report
from quantkit.results.gates.metrics import gate_numbers
from quantkit.untrusted import read_object


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
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    return [json_ready(item) for item in value] if isinstance(value, list | tuple) else value
