"""The cases of `eviction_quality.py` with presses of kvpress at the same budgets, by transformers in float32.

    python evals/checks/eviction_presses.py WORK [--shares 0.5,0.25,0.125]    # -> evals/results/eviction/presses.json

For an environment with kvpress and transformers; quantkit is not needed. A press evicts once, behind the chunk, to the
budget; what follows is added to it. Attention is transformers' own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import commit, known_rows, plain, stamp, version

RESULT = Path(__file__).parents[1] / "results/eviction/presses.json"
ABOUT = plain(stamp(versions={name: version(name) for name in ("kvpress", "torch", "transformers")}))
PRESSES = {
    "StreamingLLM": lambda ratio: kvpress.StreamingLLMPress(compression_ratio=ratio),
    "KeyDiff": lambda ratio: kvpress.KeyDiffPress(compression_ratio=ratio),
    "Knorm": lambda ratio: kvpress.KnormPress(compression_ratio=ratio),
    "SnapKV": lambda ratio: kvpress.SnapKVPress(compression_ratio=ratio, window_size=32),
    "TOVA": lambda ratio: kvpress.TOVAPress(compression_ratio=ratio),
    "ExpectedAttention": lambda ratio: kvpress.ExpectedAttentionPress(compression_ratio=ratio),
    "ObservedAttention": lambda ratio: kvpress.ObservedAttentionPress(compression_ratio=ratio),
}


def main() -> None:
    """Measure all presses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--shares", default="0.5,0.25,0.125")
    parser.add_argument("--presses", default=",".join(PRESSES))
    options = parser.parse_args()
    rows = known_rows(RESULT)
    done = {(row["model"], row["task"], row["press"], row["share"]) for row in rows}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    for task in json.loads((options.work / "cases.json").read_text()):
        settings = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(task["path"], **settings).eval()
        wanted = itertools.product(options.presses.split(","), map(float, options.shares.split(",")))
        for name, share in [("full", 1.0), *wanted]:
            if (task["model"], task["task"], name, share) in done:
                continue
            try:
                rows.append({"commit": commit(), **run(model, task, name, share)})
            except (KeyError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
                # A press that does not do these sizes, or this version of transformers.
                print(name, share, type(error).__name__, str(error)[:100], flush=True)
                continue
            RESULT.write_text(json.dumps({"about": ABOUT, "rows": rows}, indent=1) + "\n")
            print(json.dumps(rows[-1]), flush=True)


@torch.inference_mode()
def run(model: Any, task: dict[str, Any], name: str, share: float) -> dict[str, Any]:
    """One row."""
    losses, right = [], []
    for case in task["cases"]:
        ids, chunk = torch.tensor([case["ids"]]), case["chunk"]
        cache, budget = DynamicCache(), max(round(share * chunk), 1)
        if name == "full":
            model(ids[:, :chunk], past_key_values=cache, use_cache=True)
        else:
            # A little less: presses keep the integer part of what this leaves.
            with PRESSES[name](1 - (budget + 0.01) / chunk)(model):
                # Which presses ask for, and newer versions of transformers do not hand on by themselves.
                places = {"cache_position": torch.arange(chunk), "position_ids": torch.arange(chunk)[None]}
                model(ids[:, :chunk], past_key_values=cache, use_cache=True, logits_to_keep=1, **places)
            assert cache.get_seq_length() == budget, (cache.get_seq_length(), budget)
        positions = torch.arange(chunk, ids.shape[1])[None]
        logits = model(ids[:, chunk:], past_key_values=cache, position_ids=positions, use_cache=True).logits[0]
        targets = ids[0, -case["scored"] :]
        table = logits[-case["scored"] - 1 : -1].log_softmax(-1)
        losses.append(-table.gather(1, targets[:, None]).double().mean().item())
        right.append((bool((table.argmax(-1) == targets).all()), case.get("depth")))
    row = {"model": task["model"], "task": task["task"], "press": name, "share": share, "cases": len(right)}
    if task["task"] == "perplexity":
        row["value"] = math.exp(sum(losses) / len(losses))
    else:
        row["value"] = sum(hit for hit, _ in right) / len(right)
        for part, low, high in (("far", 0, 1 / 3), ("middle", 1 / 3, 2 / 3), ("near", 2 / 3, 2)):
            third = [hit for hit, depth in right if low <= depth < high]
            row[part] = sum(third) / len(third) if third else None
    return row


if __name__ == "__main__":
    main()
