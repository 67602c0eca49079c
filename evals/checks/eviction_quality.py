"""What eviction costs: recall at distance and perplexity with 50, 25 and 12.5 % of the cache, by policy and KV type.

    python evals/checks/eviction_quality.py cases WORK [--babyllama DIR --text FILE] [--items 120]
    python evals/checks/eviction_quality.py ours WORK [--shares 0.5,0.25,0.125]    # -> evals/results/eviction/ours.json
    python evals/checks/eviction_presses.py WORK      # kvpress, in an environment of its own -> .../presses.json

A case is a context, which is computed in one chunk and then evicted to the budget, what follows it, and the tokens that
are scored. Recall is of a pair of a ledger: `recall after` asks when the context has been evicted, `recall before` had
the question in the chunk. Perplexity is of the last tokens of a window. A budget is a share of the chunk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import commit, known_rows, plain, stamp

from quantkit.demo import DEMO_MODEL
from quantkit.runtime.cache import policies
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import PromptScoring, SamplingParams

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "results/eviction/ours.json"
ABOUT = plain(stamp())
NAMES = ("model", "task", "kv_cache", "policy", "page_size", "share")
RECALL, TEXT = ROOT / "tasks/demo/demo_recall.jsonl", ROOT / "tasks/demo/demo_text.txt"
SCORED = 32
TYPES = ("bf16", "int8", "int4")
LEAST_PAGES = 6  # of a budget
PAGES = {"bf16": (4,), "int8": (4,), "int4": (16, 8)}  # small, as the contexts are: the first that fits, or the last


def main() -> None:
    """Write cases, or measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cases", "ours"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--babyllama", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--items", type=int, default=120)
    parser.add_argument("--shares", default="0.5,0.25,0.125")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--policies", default=",".join(policies.REGISTRY.names()))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / "cases.json"
    if options.what == "cases":
        path.write_text(json.dumps(cases(options)))
        return
    measure(json.loads(path.read_text()), options)


def cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Models with their tasks, and of each task the cases: token ids, length of the chunk, number of scored tokens."""
    demo = LLM(lazy=True)
    found = [
        {"model": "demo", "path": str(DEMO_MODEL), "task": f"recall {when}", "cases": []}
        for when in ("after", "before")
    ]
    for line in RECALL.read_text(encoding="utf-8").splitlines()[: options.items]:
        item = json.loads(line)
        context, _, question = item["context"].rpartition("\n")
        answer = item["choices"][item["answer"]]
        head, whole = demo.encode(context), demo.encode(item["context"])
        ids = demo.encode(item["context"] + answer)
        asked = question.split()[-1]
        depth = context.index(f"{asked}{answer}") / len(context)
        if ids[: len(whole)] != whole or whole[: len(head)] != head:
            continue  # a token across the border would be another prompt
        for task, chunk in zip(found, (len(head), len(whole) - 1), strict=True):
            task["cases"].append({"ids": ids, "chunk": chunk, "scored": len(ids) - len(whole), "depth": depth})
    found.append(windows("demo", DEMO_MODEL, TEXT, 512, options.items // 2))
    if options.babyllama:
        found.append(windows("babyllama-361", options.babyllama, options.text, 256, options.items))
    return found


def windows(name: str, path: Path, text: Path, length: int, count: int) -> dict[str, Any]:
    """Perplexity of the last tokens of windows of a text."""
    tokenizer = LLM(path, lazy=True).need_tokenizer()
    ids = tokenizer(text.read_text(encoding="utf-8")[: 40 * length * count], add_special_tokens=False)["input_ids"]
    step = length - 1
    parts = [[tokenizer.bos_token_id, *ids[n * step : (n + 1) * step]] for n in range(count)]
    kept = [part for part in parts if len(part) == length]
    cases = [{"ids": part, "chunk": length - SCORED - 1, "scored": SCORED} for part in kept]
    return {"model": name, "path": str(path.resolve()), "task": "perplexity", "cases": cases}


def measure(tasks: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """A row for each model, task, KV type, policy, page size and share; those that are there already are kept."""
    rows = known_rows(RESULT)
    done = {tuple(row[name] for name in NAMES) for row in rows}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        model = load_model(Path(task["path"]), dtype="float32")
        for kind, policy, page_size, share in choices(task, options):
            if (task["model"], task["task"], kind, policy or "full", page_size, share) not in done:
                rows.append({"commit": commit(), **run(model, task, kind, policy, page_size, share)})
                RESULT.write_text(json.dumps({"about": ABOUT, "rows": rows}, indent=1) + "\n")
                print(json.dumps(rows[-1]), flush=True)


def choices(task: dict[str, Any], options: argparse.Namespace) -> Iterator[tuple[str, str | None, int, float]]:
    """KV type, policy, page size and share, as far as the budget holds what is never evicted."""
    for kind in options.types.split(","):
        yield kind, None, 16, 1.0
        least = min(case["chunk"] for case in task["cases"])
        for policy, share in itertools.product(options.policies.split(","), map(float, options.shares.split(","))):
            fitting = [size for size in PAGES[kind] if share * least >= LEAST_PAGES * size]
            yield kind, policy, (fitting or PAGES[kind][-1:])[0], share


def run(
    model: Any, task: dict[str, Any], kind: str, policy: str | None, page_size: int, share: float
) -> dict[str, Any]:
    """One row."""
    by_chunk = defaultdict(list)
    for case in task["cases"]:
        by_chunk[case["chunk"]].append(case)
    losses, right, num_bytes = [], [], 0.0
    for chunk, members in by_chunk.items():
        config = EngineConfig(
            kv_cache=kind,
            dtype="float32",
            page_size=page_size,
            max_sequences=8,
            token_budget=4096,
            prefix_cache=False,
            max_length=min(model.max_length, 2 * chunk),
            kv_budget=None if policy is None else max(round(share * chunk), 1),
            kv_policy=policy,
        )
        engine = build_engine(model, config)
        numbers = {}
        for case in members:
            scoring = PromptScoring(num_tokens=case["scored"], chunk_size=chunk)
            numbers[engine.add(case["ids"], SamplingParams(max_tokens=0, scoring=scoring))] = case
        while engine.has_work:
            for output in engine.step():
                if output.completion is not None:
                    scores = output.completion.scores
                    losses.append(-scores.logprobs.double().mean().item())
                    right.append((bool(scores.greedy.all()), numbers[output.request_id].get("depth")))
        layers = engine.runner.cache.layouts
        kept = chunk if policy is None else config.kv_budget
        num_bytes += len(members) * sum(layout.page_bytes for layout in layers) / page_size * kept
    row = {
        "model": task["model"], "task": task["task"], "kv_cache": kind, "policy": policy or "full",
        "page_size": page_size, "share": share, "bytes": round(num_bytes / len(task["cases"])), "cases": len(right),
    }  # fmt: skip
    if task["task"] == "perplexity":
        row["value"] = math.exp(sum(losses) / len(losses))
    else:
        row["value"] = sum(hit for hit, _ in right) / len(right)
        for name, low, high in (("far", 0, 1 / 3), ("middle", 1 / 3, 2 / 3), ("near", 2 / 3, 2)):
            third = [hit for hit, depth in right if low <= depth < high]
            row[name] = sum(third) / len(third) if third else None
    return row


if __name__ == "__main__":
    main()
