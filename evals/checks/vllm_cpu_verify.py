"""Whether `quantkit verify --engine vllm` and our engine say the same of a checkpoint, from their two reports.

    quantkit verify CHECKPOINT --engine vllm ... -o SERVED
    quantkit verify CHECKPOINT --dtype bf16 ... -o OURS
    python evals/checks/vllm_cpu_verify.py SERVED/report.json OURS/report.json

Prints a row: whether our KL is between the two ends, which gates hold in both, and the items of tasks that one answers
right and the other wrong, of the checkpoint and of the original. The row is kept in evals/results/vllm. Exit code 1
if the KL is outside by more than the noise (of the original in another arithmetic) or a gate holds in one only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "vllm"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("served", type=Path)
    parser.add_argument("ours", type=Path)
    options = parser.parse_args()
    row = compare(*(json.loads(file.read_text()) for file in (options.served, options.ours)))
    print(json.dumps(row))
    version = row["engine"].removeprefix("vLLM ")
    file = RESULTS / f"{version}-cpu-verify.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    kept = [*(old for old in rows if old["recipe"] != row["recipe"]), row]
    file.write_text(
        "[\n" + ",\n".join(json.dumps(one) for one in sorted(kept, key=lambda one: one["recipe"])) + "\n]\n"
    )
    sys.exit(not (row["holds but for noise"] and row["gates alike"]))


def compare(served: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The row of two reports on one checkpoint."""
    one, other = served["fidelity"], ours["fidelity"]
    noise = ours["noise_fidelity"]["mean_kl"]
    gates = [{gate["gate"]: gate["held"] for gate in report["gates"]} for report in (served, ours)]
    return {
        "recipe": served["compression"]["recipe"],
        "engine": one["engine"],
        "tokens": one["num_tokens"],
        "low": round(one["mean_kl_low"], 6),
        "high": round(one["mean_kl"], 6),
        "ours": round(other["mean_kl"], 6),
        "noise": round(noise, 6),
        "holds": one["mean_kl_low"] <= other["mean_kl"] <= one["mean_kl"],
        "holds but for noise": one["mean_kl_low"] - noise <= other["mean_kl"] <= one["mean_kl"] + noise,
        "gates": gates[0],
        "gates alike": gates[0] == gates[1],
        "items": sum(len(task["samples"]) for task in served["evaluation"]["tasks"]),
        "answered otherwise": {
            name: _otherwise(served[side], ours[side])
            for name, side in (("checkpoint", "evaluation"), ("original", "baseline"))
        },
    }


def _otherwise(served: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Items that only one of the two answers right."""
    answers = [
        {
            (sample["task"], sample["index"]): sample["scores"][task["metric"]]
            for task in report["tasks"]
            for sample in task["samples"]
        }
        for report in (served, ours)
    ]
    return [
        f"{task} {index}" for (task, index), score in sorted(answers[0].items()) if score != answers[1][task, index]
    ]


if __name__ == "__main__":
    main()
