"""Whether vLLM and our engine say the same of a checkpoint: two reports of `verify`, or two results of `eval`.

    quantkit verify CHECKPOINT --engine vllm ... -o SERVED
    quantkit verify CHECKPOINT --dtype bf16 ... -o OURS
    python evals/checks/vllm_cpu_verify.py SERVED/report.json OURS/report.json

    quantkit eval MODEL --tasks ... --data DIR --engine vllm --json > SERVED.json
    quantkit eval MODEL --tasks ... --data DIR --json > OURS.json
    python evals/checks/vllm_cpu_verify.py SERVED.json OURS.json --data DIR

Prints a row, which is kept in evals/results/vllm. Of reports: whether our KL is where the served one says that it is
in any arithmetic as close (`FidelityResult.within`; also whether it is between the two ends alone), and which gates
hold. Always: the items that one answers right and the other wrong; of BLiMP with how much likelier our engine holds
the better sentence, in nats. Exit code 1 if the KL is outside, a gate holds in one only, or an answer differs by more
than `TIE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from quantkit.results import EvaluationResult, FidelityResult

RESULTS = Path(__file__).resolve().parents[1] / "results" / "vllm"
TIE = 1e-3
"""Nats between two sentences that two engines in float32 may order differently."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("served", type=Path)
    parser.add_argument("ours", type=Path)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    served, ours = (json.loads(file.read_text()) for file in (options.served, options.ours))
    row, is_right = (
        compare_reports(served, ours) if "fidelity" in served else compare_answers(served, ours, options.data)
    )
    print(json.dumps(row))
    file = RESULTS / f"{row['engine'].removeprefix('vLLM ')}-cpu-verify.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    kept = sorted([*(old for old in rows if old["what"] != row["what"]), row], key=lambda one: one["what"])
    file.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    sys.exit(not is_right)


def compare_reports(served: dict[str, Any], ours: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The row of two reports on one checkpoint, and whether they agree."""
    one, noise, other = (
        FidelityResult.from_dict(record) for record in (served["fidelity"], served["noise_fidelity"], ours["fidelity"])
    )
    low, high = one.within(noise)
    gates = [{gate["gate"]: gate["held"] for gate in report["gates"]} for report in (served, ours)]
    otherwise = {
        name: _otherwise(*(EvaluationResult.from_dict(report[side]) for report in (served, ours)))
        for name, side in (("checkpoint", "evaluation"), ("original", "baseline"))
    }
    assert one.mean_kl_low is not None
    row = {
        "what": f"verify {served['compression']['recipe']}",
        "engine": one.engine,
        "tokens": one.num_tokens,
        "ends": [round(one.mean_kl_low, 6), round(one.mean_kl, 6)],
        "noise": round(noise.mean_kl, 6),
        "in an arithmetic as close": [round(low, 6), round(high, 6)],
        "ours": round(other.mean_kl, 6),
        "between the ends": one.mean_kl_low <= other.mean_kl <= one.mean_kl,
        "holds": low <= other.mean_kl <= high,
        "gates": gates[0],
        "gates alike": gates[0] == gates[1],
        "items": sum(len(task["samples"]) for task in served["evaluation"]["tasks"]),
        "answered otherwise": otherwise,
    }
    return row, row["holds"] and row["gates alike"] and not any(otherwise.values())


def compare_answers(served: dict[str, Any], ours: dict[str, Any], data: Path | None) -> tuple[dict[str, Any], bool]:
    """The row of two evaluations of one model, and whether they agree but for ties."""
    one, other = (EvaluationResult.from_dict(result["evaluation"]) for result in (served, ours))
    names = {task.task: round(task.value, 4) for task in one.tasks}
    gaps = {f"{task} {index}": _gap(data, other, task, index) for task, index in _otherwise(one, other)}
    row = {
        "what": f"eval {', '.join(names)}",
        "engine": one.settings["engine"],
        "arithmetic": [one.arithmetic, other.arithmetic],
        "scores": names,
        "ours": {task.task: round(task.value, 4) for task in other.tasks},
        "items": sum(len(task.samples) for task in one.tasks),
        "answered otherwise": gaps,
    }
    return row, all(abs(gap) <= TIE for gap in gaps.values())


def _otherwise(one: EvaluationResult, other: EvaluationResult) -> list[tuple[str, int]]:
    """Items that only one of the two answers right."""
    answers = [
        {(item.task, item.index): item.scores[task.metric] for task in result.tasks for item in task.samples}
        for result in (one, other)
    ]
    assert answers[0].keys() == answers[1].keys()
    return [key for key, score in sorted(answers[0].items()) if score != answers[1][key]]


def _gap(data: Path | None, ours: EvaluationResult, task: str, index: int) -> float:
    """Of a BLiMP item, how much likelier our engine holds the better sentence; infinite where that is not known."""
    if data is None or not task.startswith("local_blimp_"):
        return float("inf")
    from quantkit import LLM
    from quantkit.runtime.types import ScoredText

    line = (data / "blimp" / f"{task.removeprefix('local_blimp_')}.jsonl").read_text().splitlines()[index]
    llm = LLM(ours.model, dtype={"float32": "fp32", "bfloat16": "bf16"}[ours.arithmetic])
    texts = [tuple(llm.encode(f" {json.loads(line)[name]}")) for name in ("sentence_good", "sentence_bad")]
    good, bad = llm.score_tokens([ScoredText(ids=ids, num_scored=len(ids) - 1) for ids in texts])
    return float(good.logprobs.double().sum() - bad.logprobs.double().sum())


if __name__ == "__main__":
    main()
