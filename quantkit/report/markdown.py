"""`README.md` of a checkpoint, a Hugging Face model card: how it was made, what was measured, how to load it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from quantkit.report import speed_tables, tables
from quantkit.report.table import Table
from quantkit.report.tables import engine_table, gate_lines, headline
from quantkit.results import Report

if TYPE_CHECKING:
    from quantkit.formats.base import Format

TRANSFORMERS = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{path}", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{path}")"""
LOADERS = {  # title, language and code, of each engine that a format may name
    "transformers": ("With transformers ({needs})", "python", TRANSFORMERS),
    "vllm": ("With vLLM", "console", "vllm serve {path}"),
    "llama.cpp": ("With llama.cpp", "console", 'llama-cli -m {path} -p "Once upon a time"'),
    "quantkit": (
        "With quantkit's own runtime, in which the numbers above were measured",
        *("console", 'quantkit generate {path} --prompt "Once upon a time"'),
    ),
}


def render_markdown(report: Report) -> str:
    """The model card of a checkpoint, front matter included."""
    # A card is published: directories tell user names and mean nothing elsewhere.
    report = _without_paths(report)
    model, original = report.model, report.baseline_model
    source = original.name if original else (report.compression.model if report.compression else "another model")
    if original is not None and original.hub_id:
        source = f"[{source}](https://huggingface.co/{original.hub_id})"
    gates = [f"- {plain(line)}" for line in gate_lines(report.gates)]
    known = _license(report)
    runs = list(speed_tables.report_runs(report))
    results = [
        tables.comparison_table(report.comparisons),
        tables.length_table(report.comparisons),
        tables.fidelity_table(report.fidelity, report.noise_fidelity),
        speed_tables.latency_table(runs),
        speed_tables.throughput_table(runs),
        speed_tables.memory_table(report.benchmark, report.baseline_benchmark),
    ]
    parts = [
        _front_matter(report),
        f"# {plain(model.name)}",
        plain(f"{model.scheme or model.format} version of {source}, made with quantkit. {headline(report)}"),
        "\n".join(["## Gates", "", *gates]) if gates else "",
        "## Results",
        *(markdown_table(table) for table in results if table is not None),
        "" if report.evaluation or report.benchmark or report.fidelity else "Nothing was measured.",
        "## How it was made",
        markdown_table(tables.making_table(report)),
        "## How to load it",
        *_loading(report),
        _readers(report),
        "## License",
        f"{plain(known)}, as the original."
        if known
        else "Unknown: the original's license applies, see its model card.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """A text of somebody else as one line of Markdown in which no HTML begins."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", " ".join(text.split()))


def _without_paths(report: Report) -> Report:
    """The report with names where it has directories of this machine."""
    model, original, made = report.model, report.baseline_model, report.compression
    if original is not None and not original.hub_id:
        original = replace(original, name=PurePath(original.name).name)
    return replace(
        report,
        model=replace(model, name=PurePath(model.name).name, path=PurePath(model.path).name),
        baseline_model=original,
        compression=None if made is None else replace(made, model=PurePath(made.model).name),
    )


def _front_matter(report: Report) -> str:
    """YAML; every text is written as JSON, which YAML reads, so that no name can break it."""
    model, original, known = report.model, report.baseline_model, _license(report)
    format_ = _format(model.format)
    tags = ["quantkit", "quantized", model.format, *model.scheme.split()[:1]]
    lines = []
    # The hub resolves `base_model`: a local name there points at a stranger's model or at none.
    if original is not None and original.hub_id:
        lines += [f"base_model: {json.dumps(original.hub_id)}", "base_model_relation: quantized"]
    if known:
        lines.append(f"license: {json.dumps(known)}")
    lines.append(f"library_name: {format_.library if format_ else 'transformers'}")
    lines += ["pipeline_tag: text-generation", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in dict.fromkeys(tags) if tag]
    return "\n".join(["---", *lines, "---"])


def markdown_table(table: Table) -> str:
    """A table as GitHub's Markdown writes it."""
    rules = ("---" if column.is_text else "---:" for column in table.columns)
    rows = [[column.title for column in table.columns], rules, *table.cells]
    # A bar inside a cell begins another column.
    text = "\n".join("| " + " | ".join(plain(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n\n".join(part for part in (table.title and f"{table.title}:", text, table.note) if part)


def _loading(report: Report) -> list[str]:
    """Each loader that reads the format, with a command."""
    format_ = _format(report.model.format)
    needs = f"`pip install {format_.package}`" if format_ and format_.package else "nothing else needed"
    path = plain(report.model.hub_id or report.model.path or report.model.name)
    unread = {reading.engine.lower() for reading in report.model.engines if not reading.is_right}
    engines = [name for name in (*(format_.engines if format_ else ()), "quantkit") if name not in unread]
    blocks = [
        f"{title}:\n\n```{language}\n{code}\n```" for title, language, code in (LOADERS[engine] for engine in engines)
    ]
    return [block.format(path=path, needs=needs) for block in blocks]


def _readers(report: Report) -> str:
    """Return the section about engines that read the checkpoint, and the caches that they ignore."""
    table = engine_table("engine", report.model.engines)
    return f"### Who reads it\n\n{markdown_table(table)}" if table else ""


def _format(name: str) -> Format | None:
    """The format of that name; None for one that a newer version wrote."""
    from quantkit.formats import REGISTRY  # they bring torch, which only a card waits for

    known: Format | None = REGISTRY.all().get(name)
    return known


def _license(report: Report) -> str | None:
    return report.model.license or (report.baseline_model.license if report.baseline_model else None)
