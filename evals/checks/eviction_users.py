"""Users per GiB: requests in flight and tokens per second in one pool of pages, with a budget and without, by the plan.

    python evals/checks/eviction_users.py [MODEL] [--pool 32MiB] [--prompt 960] [--new 64] [--budget 25%] [--rounds 3]
                                          # -> evals/results/eviction/users.json

All requests are there from the beginning; in flight are those that have pages, averaged over the steps while others
wait. The plan's ratio is of requests that fit by `quantkit plan`'s sizes. On a quiet machine only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import plain, stamp

from quantkit.demo import DEMO_MODEL
from quantkit.models.cache import DEFAULT_PAGE_SIZE
from quantkit.planning import estimate
from quantkit.planning.limits import Eviction
from quantkit.quantities import parse_budget, parse_bytes
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import SamplingParams

RESULT = Path(__file__).parents[1] / "results/eviction/users.json"


def main() -> None:
    """Measure in turns, and write what was measured beside what was planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL)
    parser.add_argument("--pool", default="32MiB")
    parser.add_argument("--prompt", type=int, default=960)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--budget", default="25%")
    parser.add_argument("--policy", default="window")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model, length = load_model(options.model), options.prompt + options.new
    shape = estimate(options.model).shape
    rows: dict[str, list[dict[str, float]]] = {"full": [], "budget": []}
    for _ in range(options.rounds):
        for name, runs in rows.items():
            runs.append(run(model, options, length, name == "budget"))
    planned = {name: fitting(shape, model, options, length, name == "budget") for name in rows}
    measured = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in rows.items()
    }
    ratio = measured["budget"]["in_flight"] / measured["full"]["in_flight"]
    result = {
        "about": plain(stamp()),
        "model": options.model.name, "pool": options.pool, "prompt": options.prompt, "new": options.new,
        "budget": options.budget, "policy": options.policy, "planned": planned, "measured": measured,
        "planned_ratio": planned["budget"] / planned["full"], "measured_ratio": ratio,
    }  # fmt: skip
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def settings(options: argparse.Namespace, length: int, evicts: bool) -> dict[str, Any]:
    """Of the engine; each request is of the longest length that it allows."""
    budget = {"kv_budget": options.budget, "kv_policy": options.policy} if evicts else {}
    return {"max_length": length, "max_sequences": options.requests, "prefix_cache": False, **budget}


def run(model: Any, options: argparse.Namespace, length: int, evicts: bool) -> dict[str, float]:
    """All requests to their end: how many at once, and how fast."""
    layouts = model.layouts("auto", DEFAULT_PAGE_SIZE)
    pages = parse_bytes(options.pool) // sum(layout.page_bytes for layout in layouts)
    engine, draw = (
        build_engine(model, EngineConfig(num_pages=pages, **settings(options, length, evicts))),
        random.Random(0),
    )
    for _ in range(options.requests):
        prompt = [5 + draw.randrange(200) for _ in range(options.prompt)]
        engine.add(prompt, SamplingParams(max_tokens=options.new, ignore_eos=True))
    in_flight, began, started = [], time.perf_counter(), False
    while engine.has_work:
        engine.step()
        # From the first that has ended on, as until then the pool fills up, and while somebody waits.
        started |= len(engine.scheduler.running) + len(engine.scheduler.waiting) < options.requests
        if started and engine.scheduler.waiting:
            in_flight.append(len(engine.scheduler.running))
    seconds = time.perf_counter() - began
    return {
        "in_flight": statistics.mean(in_flight),
        "most_in_flight": max(in_flight),
        "tokens_per_s": options.requests * options.new / seconds,
        "preemptions": engine.scheduler.num_preemptions,
    }


def fitting(shape: Any, model: Any, options: argparse.Namespace, length: int, evicts: bool) -> int:
    """Requests that fit into the pool at once by the planner's sizes, a chunk of one of their prompts beside them."""
    config = EngineConfig(**settings(options, length, evicts))
    budget = parse_budget(options.budget) if evicts else None
    form = next(
        row.form for row in estimate(options.model, kv_cache="fp32" if model.dtype.itemsize == 4 else "bf16").caches
    )
    eviction = Eviction(budget=budget, policy=options.policy if evicts else None)
    chunk = eviction.chunk_bytes(shape, length, form, config.token_budget)
    return int((parse_bytes(options.pool) - chunk) // eviction.sequence_bytes(shape, length, form))


if __name__ == "__main__":
    main()
