"""Print the gates of a report.json as a table in Markdown: python3 gate_table.py REPORT.json. Standard library only."""

import json
import sys
from pathlib import Path
from typing import Any


def gate_table(report: dict[str, Any]) -> str:
    """Return a heading with the verdict, a row per gate, and the suggested changes."""
    gates = report["gates"]
    held = sum(gate["held"] for gate in gates)
    heading = f"### {_cell(report['model']['name'])}: {held} of {len(gates)} gates hold"
    rows = [f"| `{gate['gate']}` | {_value(gate['value'])} | {_result(gate['held'])} |" for gate in gates]
    lines = [heading, "", "| Gate | Value | Result |", "|---|---|---|", *rows]
    remedies = dict.fromkeys(gate["remedy"] for gate in gates if not gate["held"] and gate["remedy"])
    if remedies:
        lines += ["", "Suggested changes:", "", *(f"- {_cell(remedy)}" for remedy in remedies)]
    return "\n".join(lines)


def _value(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"


def _result(held: bool) -> str:
    return "held" if held else "**failed**"


def _cell(text: str) -> str:
    """Return a text that is one line and has no markup of its own."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")


if __name__ == "__main__":
    print(gate_table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
