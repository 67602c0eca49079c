"""Writes the part of docs/formats.md about what vLLM's CPU build was seen to do, from the rows of vllm_cpu.py.

    python evals/checks/vllm_cpu_page.py [--check]

--check: write nothing; exit code 1 if the page says otherwise. What engines do on GPUs is read from their sources and
is another table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "evals" / "results" / "vllm", ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- written by evals/checks/vllm_cpu_page.py -->", "<!-- end -->"
NAMES = {"gemma3_text": "gemma3"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page = PAGE.read_text()
    new = put(page, section())
    if options.check:
        sys.exit(new != page)
    PAGE.write_text(new)


def put(page: str, text: str) -> str:
    """The page with what stands between the marks replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.split(END, 1)[1]}"


def section() -> str:
    """Versions, the table, and the breaches."""
    rows, breaches = (_newest(kind) for kind in ("rows", "breaches"))
    made = rows["made"]
    noticed = sum(row["verdict"] == "noticed" for row in breaches["rows"])
    versions = f"vLLM {made['vllm']}, torch {made['torch']}, compared with {made['reference']}."
    found = f"Of {len(breaches['rows'])} faults planted in checkpoints of the demo model {noticed} were noticed: "
    names = "; ".join(row["breach"] for row in breaches["rows"])
    return f"{versions}\n\n{_table(rows['rows'])}\n{_refusals(rows['rows'])}\n{found}{names}.\n"


def _newest(kind: str) -> dict[str, Any]:
    file = max(RESULTS.glob(f"*-cpu-{kind}.json"))
    data: dict[str, Any] = json.loads(file.read_text())
    return data


def _table(rows: list[dict[str, Any]]) -> str:
    models = list(dict.fromkeys(row["model"] for row in rows))
    cases = sorted({row["case"] for row in rows}, key=lambda case: (case != "unquantized", case))
    known = {(row["model"], row["case"]): row for row in rows}
    head = ["", *(NAMES.get(model, model) for model in models)]
    lines = [head, ["---"] * len(head)]
    lines += [[f"`{case}`", *(_cell(known.get((model, case))) for model in models)] for case in cases]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != "agrees" or "difference" not in row:
        return {"agrees": "used"}.get(row["verdict"], row["verdict"].removesuffix(" by vLLM"))
    return f"{row['difference']:.3f}"


def _refusals(rows: list[dict[str, Any]]) -> str:
    """What vLLM says where it refuses, once for each model and reason."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["verdict"] == "refused by vLLM":
            models = said.setdefault((row["case"], _shortened(row["reason"])), [])
            models.append(NAMES.get(row["model"], row["model"]))
    return "".join(f"- `{case}` ({', '.join(who)}): {reason}\n" for (case, reason), who in sorted(said.items()))


def _shortened(reason: str) -> str:
    text = reason.partition(": ")[2].replace("|", "/")
    return text if len(text) <= 160 else f"{text[:157]}..."


if __name__ == "__main__":
    main()
