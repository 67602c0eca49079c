"""Run every shipped recipe on a real model: count linears that are worse than rounding, and check the gates.

    python evals/accuracy/every_recipe.py MODEL WORK TEXT                                    # as shipped
    python evals/accuracy/every_recipe.py MODEL WORK TEXT --samples 16 --sequence-length 256 # less calibration data
        [--recipes awq-int4,gptq-int4]                      # -> evals/results/recipes/<model>[-16x256].json

KL and perplexity are what `quantkit verify` reports for the first 4k tokens of TEXT; no tasks are run.

A linear counts as worse than rounding if its error is more than 2 % above the error of rounding to nearest. Errors are
relative to the original model's output, on tokens that were held out of the calibration. Recipes that do not measure
these errors have no count. Each row is saved when it is done; saved rows are not measured again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import run_measured
from provenance import known_rows, plain, stamp, write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "evals/results/recipes"
MARGIN = 1.02


def main() -> None:
    """Measure and save one row per recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--recipes", help="names of recipes, separated by commas")
    options = parser.parse_args()
    given = {"--samples": options.samples, "--sequence-length": options.sequence_length}
    size = f"-{options.samples}x{options.sequence_length}" if all(given.values()) else ""
    file = RESULTS / f"{options.model.resolve().name}{size}.json"
    rows, shipped = known_rows(file), sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    about = plain(stamp()) or {}
    for recipe in options.recipes.split(",") if options.recipes else shipped:
        if any(row["recipe"] == recipe for row in rows):
            continue
        text = (ROOT / f"recipes/{recipe}.yaml").read_text(encoding="utf-8")
        arguments = [str(one) for pair in given.items() if pair[1] and "\ncalibration:" in text for one in pair]
        made = {"commit": about["commit"], "machine": about["machine"]}
        rows.append({"recipe": recipe, **made, **row(options, recipe, arguments)})
        print(json.dumps(rows[-1]), flush=True)
        write_json(file, {"about": about, "rows": rows})


def row(options: argparse.Namespace, recipe: str, arguments: list[str]) -> dict[str, Any]:
    """Quantize and verify with one recipe, and return the figures."""
    options.work.mkdir(parents=True, exist_ok=True)
    output = options.work / f"{recipe}.gguf" if recipe.startswith("gguf") else options.work / recipe
    shutil.rmtree(output, ignore_errors=True)
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "quantkit", "quantize", str(options.model), "--recipe", recipe, "-o", str(output)]
    log = options.work / "log.txt"
    usage = run_measured([*command, *arguments, "--no-resume", "--quiet", "--json", "--device", "cpu"], log)
    said = log.read_text(encoding="utf-8")
    made = {"code": usage.code, "wall_s": round(usage.wall_s, 1), "cpu_s": usage.cpu_s, "others": usage.others_share}
    if usage.code:
        return made | {"said": usage.said}
    result = json.loads(said[said.index("{") :])
    pairs = [
        (linear["error"], linear["rounding_error"])
        for layer in result["layers"]
        for linear in layer["linears"]
        if linear.get("measure") == "held-out"
    ]
    worse = [error / rounding for error, rounding in pairs if error > MARGIN * rounding]
    return made | {
        "linears": result["num_quantized"],
        "held_out": len(pairs),
        "worse": len(worse),
        "worst": max(worse, default=None),
        **verified(options, output),
    }


def verified(options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Return KL and perplexity as `quantkit verify` reports them, with the gates that do not hold."""
    log, report = options.work / "verify.txt", options.work / "report"
    shutil.rmtree(report, ignore_errors=True)
    command = [sys.executable, "-m", "quantkit", "verify", str(output), "--baseline", str(options.model)]
    text = ["--text", str(options.text), "--text-tokens", "4k"]
    only = ["--suite", "none", "--no-bench", "--no-behaviour", "--no-sensitivity", "--device", "cpu", "--quiet"]
    usage = run_measured([*command, *text, *only, "-o", str(report)], log)
    if not (report / "report.json").exists():
        return {"verify_code": usage.code, "verify_said": usage.said}
    result = json.loads((report / "report.json").read_text(encoding="utf-8"))
    gates = [gate for gate in result["gates"] if gate["value"] is not None]
    return {
        "kl": result["metrics"]["kl"],
        "perplexity_ratio": result["metrics"]["perplexity_ratio"],
        "checked": [gate["gate"] for gate in gates],
        "missed": [gate["gate"] for gate in gates if not gate["held"]],
    }


if __name__ == "__main__":
    main()
