"""lm-eval by transformers (HFLM) and by quantkit on the same float32 model: every item's answer, and the time.

    python evals/checks/hflm_parity.py quantkit/demo/model --tasks demo
    python evals/checks/hflm_parity.py MODEL --data DIR --tasks local_blimp,local_copa --limit 200 --batch-sizes 1,16

An item counts as different when the two disagree about any of its metrics. Where they disagree and one of them scores
two answers within --tie of each other (nats), it is a tie: shown, but not held against either. Time is CPU time of this
process for the whole evaluation, models and items loaded before, tokenization included; HFLM runs once per batch size
and its fastest counts. Exits with 1 when an item differs that is no tie, or quantkit takes longer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from quantkit.evaluate.language_model import QuantkitLM
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.tasks import load_tasks


def run(model: Any, names: list[str], source: EvaluationOptions, limit: int | None) -> tuple[dict[str, Any], float]:
    """Samples by task, and seconds of CPU time."""
    tasks = load_tasks(names, source)
    manager = TaskManager(include_defaults=False)
    began = time.process_time()
    found = simple_evaluate(model, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=0)
    return found, time.process_time() - began


def log_likelihoods(row: dict[str, Any]) -> list[float]:
    """What each answer scored; empty for generated answers."""
    return [answer[0] for answer in row["filtered_resps"] if isinstance(answer, tuple | list)]


def nearest(row: dict[str, Any]) -> float:
    """Smallest difference between two answers' scores, nats; by character too, as acc_norm compares them."""
    scores = log_likelihoods(row)
    lengths = [max(1, len(arguments[1])) for arguments in row["arguments"]]
    forms = (scores, [s / n for s, n in zip(scores, lengths, strict=True)] if scores else [])
    gaps = [abs(a - b) for form in forms for i, a in enumerate(form) for b in form[i + 1 :]]
    return min(gaps, default=float("inf"))


def compare(ours: dict[str, Any], theirs: dict[str, Any], tie: float) -> list[dict[str, Any]]:
    """One row per task: items, how many differ, ties among them, and the largest difference of a log-likelihood."""
    rows = []
    for task, samples in ours["samples"].items():
        differing, ties, largest = [], [], 0.0
        for one, other in zip(samples, theirs["samples"][task], strict=True):
            assert one["doc_hash"] == other["doc_hash"], f"{task}: items are not the same"
            pairs = zip(log_likelihoods(one), log_likelihoods(other), strict=True)
            largest = max([largest, *(abs(a - b) for a, b in pairs)])
            metrics = [name for name in one["metrics"] if name != "perplexity"]
            if any(one[name] != other[name] for name in metrics):
                gap = min(nearest(one), nearest(other))
                (ties if gap < tie else differing).append({"item": one["doc_id"], "gap": gap})
        rows.append({"task": task, "items": len(samples), "differ": differing, "ties": ties, "largest": largest})
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", required=True, help="names, with commas between")
    parser.add_argument("--include-path", type=Path, action="append", default=[])
    parser.add_argument("--data", type=Path, action="append", default=[])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-sizes", default="1,16", help="of HFLM")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tie", type=float, default=1e-4, help="nats between answers that count as equal")
    return parser.parse_args()


def main() -> int:
    """Run both, compare, print."""
    args = arguments()
    torch.set_num_threads(args.threads)
    source = EvaluationOptions(include_path=tuple(args.include_path), data=tuple(args.data))
    names = args.tasks.split(",")
    model = QuantkitLM(args.model, dtype="float32", threads=args.threads)
    ours, seconds = run(model, names, source, args.limit)
    reference = HFLM(pretrained=args.model, dtype="float32", device="cpu")
    times = {}
    for size in map(int, args.batch_sizes.split(",")):
        reference.batch_size_per_gpu = size
        theirs, times[size] = run(reference, names, source, args.limit)
    rows = compare(ours, theirs, args.tie)
    for row in rows:
        print(
            f"{row['task']:40} {row['items']:6} items  {len(row['differ'])} differ  {len(row['ties'])} ties  "
            f"largest log-likelihood difference {row['largest']:.1e}"
        )
        for item in row["differ"] + row["ties"]:
            print(f"    item {item['item']}: two answers {item['gap']:.1e} nats apart")
    best = min(times, key=lambda size: times[size])
    told = ", ".join(f"{value:.1f} s at batch {size}" for size, value in times.items())
    print(
        f"CPU time, {args.threads} thread(s): quantkit {seconds:.1f} s, HFLM {told}; ratio {seconds / times[best]:.2f}"
    )
    print(json.dumps({"rows": rows, "quantkit_s": seconds, "hflm_s": times}))
    return 1 if any(row["differ"] for row in rows) or seconds > times[best] else 0


if __name__ == "__main__":
    sys.exit(main())
