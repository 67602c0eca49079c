"""Two thousand requests with a budget, a prefix cache and too few pages: no page is lost, no text depends on others.

    python evals/checks/eviction_soak.py [MODEL] [--policies window,keydiff] [--types auto,int8] [--requests 2000]
                                          # -> evals/results/eviction/soak.json

Requests begin alike now and then, are cancelled now and then, and are preempted. After every step the page pool is
compared with the sequences that hold pages, and no sequence may keep more than budget and chunk. Some requests are run
again alone, and must give the same text. (With a quantized cache texts may depend on the batch, with a budget or
without one: `same_alone` is then only reported.) MODEL is a directory; without it, the demo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import commit, known_rows, plain, stamp

from quantkit.demo import DEMO_MODEL
from quantkit.runtime.cache import policies
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.assembly import build_engine
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import Completion, SamplingParams

RESULT = Path(__file__).parents[1] / "results/eviction/soak.json"
LONGEST, NEW, CHECKED = 120, 48, 40
POOL = {"num_pages": 80, "page_size": 8, "kv_budget": 64}


def main() -> None:
    """Run a soak for each policy and KV type, and keep what happened; those that are there already are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--policies", default=",".join(policies.REGISTRY.names()))
    parser.add_argument("--types", default="auto,int8,int4")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = load_model(options.model, dtype="float32")
    rows = known_rows(RESULT)
    for kind, policy in itertools.product(options.types.split(","), options.policies.split(",")):
        if (policy, kind) not in {(row["policy"], row["kv_cache"]) for row in rows}:
            name = {"commit": commit(), "policy": policy, "kv_cache": kind}
            rows.append({**name, **POOL, **soak(model, options, policy, kind)})
            RESULT.write_text(json.dumps({"about": plain(stamp()), "rows": rows}, indent=1) + "\n")
            print(json.dumps(rows[-1]), flush=True)


def soak(model: Any, options: argparse.Namespace, policy: str, kind: str) -> dict[str, Any]:
    """What happened to so many requests."""
    draw = random.Random(options.seed)

    def engine(**settings: int | None) -> Engine:
        config = EngineConfig(
            max_sequences=16, token_budget=64, kv_policy=policy, kv_cache=kind, dtype="float32", seed=options.seed,
            **{**POOL, **settings},
        )  # fmt: skip
        return build_engine(model, config)

    common = [5 + draw.randrange(200) for _ in range(LONGEST)]
    busy, done, asked, alive, cancelled = engine(), {}, {}, [], 0
    while len(asked) < options.requests or busy.has_work:
        while len(asked) < options.requests and len(alive) < 32:
            head = common[: draw.choice([0, 0, 16, 40, 100])]
            prompt = (head + [5 + draw.randrange(200) for _ in range(draw.randint(1, LONGEST))])[:LONGEST]
            number = busy.add(prompt, params(draw.randint(1, NEW)))
            alive.append(number)
            asked[number] = prompt
        if alive and draw.random() < 0.1:
            assert busy.cancel(alive.pop(draw.randrange(len(alive)))) is not None
            cancelled += 1
        for output in busy.step():
            if output.completion is not None:
                done[output.request_id] = output.completion
                alive.remove(output.request_id)
        check(busy)
    assert busy.pool.num_free == busy.pool.num_pages, "pages are lost"
    assert len(done) + cancelled == options.requests, "requests are lost"
    chosen = draw.sample(sorted(done), CHECKED)
    same = sum(again(engine(num_pages=None), asked[number], done[number]) for number in chosen)
    assert same == CHECKED or kind != "auto", "a text depends on who else runs"
    return {
        "requests": len(asked), "cancelled": cancelled, "preemptions": busy.scheduler.num_preemptions,
        "evicted_pages": busy.eviction.num_evicted_pages, "prefix_hit_tokens": busy.prefix.num_hit_tokens,
        "same_alone": same, "asked_alone": CHECKED,
    }  # fmt: skip


def params(new: int) -> SamplingParams:
    """Greedy, to the last token."""
    return SamplingParams(max_tokens=new, ignore_eos=True)


def check(engine: Engine) -> None:
    """No page is lost or held twice, and nobody keeps more than it may."""
    engine.check_integrity()
    for sequence in engine.scheduler.running:
        assert sequence.num_kept <= engine.eviction.budget.peak, "more is kept than budget and chunk"
        if sequence.num_computed >= sequence.num_prompt:
            assert sequence.num_kept < engine.eviction.budget.tokens, "the budget is exceeded"


def again(engine: Engine, prompt: list[int], completion: Completion) -> bool:
    """Whether a request alone gives the same tokens."""
    engine.add(prompt, params(len(completion.token_ids)))
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                return output.completion.token_ids == completion.token_ids
    return False


if __name__ == "__main__":
    main()
