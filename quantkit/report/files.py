"""Write all files of one report into a directory, and read `report.json` back.

The schema of `report.json` is docs/report.schema.json. Numbers that JSON cannot represent (infinity, NaN) become null.
The entry `metrics` is for tools such as `jq`. It repeats the numbers that gates can limit, under the names that gates
use, and is ignored when a report is read back.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from quantkit.errors import ReportError, located
from quantkit.machine.system import folder_lock
from quantkit.quantities import number
from quantkit.report import speed_tables, tables
from quantkit.report.behaviour_tables import behaviour_tables
from quantkit.report.page import render_html
from quantkit.report.table import Table, printable
from quantkit.report.tables import VERDICTS, engine_table, gate_lines, headline, recovery_text
from quantkit.results import EngineReading, Report
from quantkit.results.gates import gate_numbers
from quantkit.safety.untrusted import read_object

if TYPE_CHECKING:
    from quantkit.formats.base import Format

TRANSFORMERS = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{path}", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{path}")"""
LOADERS = {  # title, language and code, of each engine that a format may name
    "transformers": ("With transformers ({needs})", "python", TRANSFORMERS),
    "vllm": ("With vLLM", "console", "vllm serve {path}"),
    "mlx-lm": ("With mlx-lm ({needs})", "console", 'mlx_lm.generate --model {path} --prompt "Once upon a time"'),
    "llama.cpp": ("With llama.cpp", "console", 'llama-cli -m {path} -p "Once upon a time"'),
    "quantkit": ("With quantkit", "console", 'quantkit generate {path} --prompt "Once upon a time"'),
}


def render_markdown(report: Report) -> str:
    """Render the model card of a checkpoint, including its front matter."""
    # A card is published, and paths would reveal user names and mean nothing on other machines.
    report = _without_paths(report)
    model, original = report.model, report.baseline_model
    source = original.name if original else (report.compression.model if report.compression else "another model")
    if original is not None and original.hub_id:
        source = f"[{source}](https://huggingface.co/{original.hub_id})"
    gates = [f"- {plain(line)}" for line in gate_lines(report.gates)]
    known = model.license or (original.license if original else None)
    # The hub resolves `base_model`: a local name would point to somebody else's model, or to none.
    origin = {"base_model": original and original.hub_id, "license": known}
    parts = [
        front_matter(origin, model.format, *model.scheme.split()[:1]),
        f"# {plain(model.name)}",
        plain(f"{model.scheme or model.format} version of {source}, made with quantkit. {headline(report)}"),
        "\n".join(["## Gates", "", *gates]) if gates else "",
        "## Results",
        *map(markdown_table, report_tables(report)),
        "" if report.evaluation or report.benchmark or report.fidelity else "Nothing was measured.",
        "## How it was made",
        markdown_table(tables.making_table(report)),
        loading(model.format, model.hub_id or model.path or model.name, model.engines),
        "## License",
        f"{plain(known)}, like the original."
        if known
        else "Unknown: the original's license applies, see its model card.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def report_tables(report: Report) -> list[Table]:
    """Return the tables of all measured results, for the model card and the terminal."""
    runs, sensitivity = list(speed_tables.report_runs(report)), report.sensitivity
    measured = (
        tables.comparison_table(report.comparisons),
        tables.length_table(report.comparisons),
        tables.fidelity_table(report.fidelity, report.noise_fidelity),
        tables.drift_table(report.drift),
        *behaviour_tables(report),
        tables.worst_groups_table(sensitivity) if sensitivity else None,
        speed_tables.latency_table(runs),
        speed_tables.throughput_table(runs),
        speed_tables.memory_table(report.benchmark, report.baseline_benchmark),
    )
    return [table for table in measured if table is not None]


def plain(text: str) -> str:
    """Return untrusted text as one line of Markdown in which HTML tags are escaped."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", " ".join(text.split()))


def _without_paths(report: Report) -> Report:
    """Return a copy of a report in which paths on this machine are shortened to their last part."""
    model, original, made = report.model, report.baseline_model, report.compression
    if original is not None and not original.hub_id:
        original = replace(original, name=PurePath(original.name).name)
    return replace(
        report,
        model=replace(model, name=PurePath(model.name).name, path=PurePath(model.path).name),
        baseline_model=original,
        compression=None if made is None else replace(made, model=PurePath(made.model).name),
    )


def front_matter(origin: Mapping[str, Any], format_name: str, *tags: str) -> str:
    """Render the YAML front matter of a model card for the Hugging Face Hub.

    Args:
        origin: entries about the source model, such as `base_model` and `license`; entries that are None are left out.
        format_name: on-disk format.
        tags: tags to add to `quantkit`, `quantized` and the format's tag.
    """
    import yaml

    format_ = _format(format_name)
    entries = {name: entry for name, entry in origin.items() if entry is not None}
    if "base_model" in entries:
        # Removed and added again, so that `base_model_relation` directly follows `base_model`.
        entries |= {"base_model": entries.pop("base_model"), "base_model_relation": "quantized"}
    entries |= {"library_name": format_.library if format_ else "transformers", "pipeline_tag": "text-generation"}
    named = (format_ and format_.tag) or format_name
    entries["tags"] = list(dict.fromkeys(filter(None, ("quantkit", "quantized", named, *tags))))
    return f"---\n{yaml.safe_dump(entries, sort_keys=False)}---"


def markdown_table(table: Table) -> str:
    """Render a table in GitHub's Markdown."""
    rules = ("---" if column.is_text else "---:" for column in table.columns)
    rows = [[column.title for column in table.columns], rules, *table.cells]
    # A bar inside a cell would begin another column.
    text = "\n".join("| " + " | ".join(plain(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n\n".join(part for part in (table.title and f"{plain(table.title)}:", text, plain(table.note)) if part)


def loading(format_name: str, path: str, engines: Sequence[EngineReading]) -> str:
    """Render a section on loading a checkpoint: code for each program that loads the format, and a table of engines.

    Args:
        format_name: on-disk format.
        path: directory, file or hub id in the commands.
        engines: predictions of how engines read the checkpoint.
    """
    format_ = _format(format_name)
    needs = f"`pip install {format_.package}`" if format_ and format_.package else "nothing else needed"
    unread = {reading.engine.lower() for reading in engines if not reading.is_right}
    loaders = [LOADERS[name] for name in (*(format_.engines if format_ else ()), "quantkit") if name not in unread]
    blocks = [f"{title}:\n\n```{language}\n{code}\n```" for title, language, code in loaders]
    table = engine_table("engine", engines)
    readers = ["### Who reads it", markdown_table(table)] if table else []
    return "\n\n".join(
        ["## How to load it", *(block.format(path=plain(path), needs=needs) for block in blocks), *readers]
    )


def _format(name: str) -> Format | None:
    """Return the format with this name; None if the name is unknown, e.g. written by a newer version of quantkit."""
    from quantkit.formats import REGISTRY  # imports torch, which only a card needs

    known: Format | None = REGISTRY.all().get(name)
    return known


def dumps(report: Report) -> str:
    """Convert a report to JSON text; equal reports give equal bytes."""
    document = {**report.to_dict(), "metrics": gate_numbers(report)}
    # `NaN` is not valid JSON, and strict parsers reject a document that contains it.
    return json.dumps(json_ready(document), ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def read_report(path: Path | str) -> Report:
    """Read a report from a file or a checkpoint's directory.

    Raises:
        ReportError: the file does not exist, is not valid JSON, has an unsupported version, or is not a report.
    """
    path = Path(path)
    file = path / "report.json" if path.is_dir() else path
    if not file.exists():
        todo = f"`quantkit verify {path}` makes one" if path.is_dir() else "give a checkpoint's directory or its report"
        raise ReportError(f"{file}: no such file; {todo}")
    data = read_object(file, ReportError, "give a report.json that `quantkit verify` wrote")
    with located(str(file)):
        return Report.from_dict(data)


def json_ready(value: Any) -> Any:
    """Return a copy of a value in which None replaces the numbers that JSON cannot represent: NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    return [json_ready(item) for item in value] if isinstance(value, list | tuple) else value


def render_junit(report: Report) -> str:
    """Render gates and comparisons of a report as JUnit test suites."""
    gates, comparisons, add = len(report.gates), len(report.comparisons), ElementTree.SubElement
    failed = str(sum(not gate.held for gate in report.gates))
    # The name comes first, because quantkit recognizes its own files by it; see `SIGNS`.
    name = f"quantkit verify {report.model.name}"
    root = ElementTree.Element("testsuites", {"name": name, "tests": str(gates + comparisons), "failures": failed})
    suite = add(root, "testsuite", {"name": "gates", "tests": str(gates), "failures": failed})
    if adapter := tables.describe_adapter(report):
        add(add(suite, "properties"), "property", name="adapter", value=adapter)
    for gate in report.gates:
        case = add(suite, "testcase", classname="quantkit.results.gates", name=gate.gate)
        if gate.held:
            add(case, "system-out").text = gate.explanation
        else:
            add(case, "failure", message=gate.explanation, type="gate").text = gate.remedy
    suite = add(root, "testsuite", {"name": "comparisons", "tests": str(comparisons), "failures": "0"})
    for comparison in report.comparisons:
        case = add(suite, "testcase", classname="quantkit.comparisons", name=comparison.subject)
        values = f"{comparison.metric}: {number(comparison.baseline, 4)} before, {number(comparison.value, 4)} now"
        text = f"{values}; recovery {recovery_text(comparison)}; {VERDICTS[comparison.verdict]}"
        add(case, "system-out").text = text
    ElementTree.indent(root)
    # XML does not allow most control characters.
    return f'<?xml version="1.0" encoding="utf-8"?>\n{printable(ElementTree.tostring(root, encoding="unicode"))}\n'


# Text near the beginning of each file that quantkit writes under these names, keyed by file name.
SIGNS = {
    "report.json": '"bits_per_weight"',
    "junit.xml": 'testsuites name="quantkit ',
    "README.md": "with quantkit",
    "report.html": '<meta name="generator" content="quantkit">',
}


FILES: dict[str, tuple[str, Callable[[Report], str]]] = {
    "json": ("report.json", dumps),
    "junit": ("junit.xml", render_junit),
    "card": ("README.md", render_markdown),
    "html": ("report.html", render_html),
}


def write_report(report: Report, directory: Path | str) -> tuple[dict[str, Path], str]:
    """Write `report.json`, `junit.xml`, the model card `README.md`, and last the page `report.html`.

    Args:
        report: the report.
        directory: directory, created if it does not exist.
    Returns:
        The files, keyed by kind ("json", "junit", "card", "html"), and the reason why the page was not written, e.g. a
        missing package; the reason is empty if the page was written.
    Raises:
        OutputError, ResourceError: the files cannot be written.
    """
    from quantkit.output.writer import write_text, writing  # imports torch, which reading a report does not need

    directory = Path(directory)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with folder_lock(directory):  # so that the files of two reports are not mixed
            files, problem = {}, ""
            # The page comes last, because it alone fails if a package is missing.
            for kind, (name, render) in FILES.items():
                try:
                    write_text(directory / name, render(report))
                    files[kind] = directory / name
                except ReportError as error:
                    problem = str(error)
            return files, problem
