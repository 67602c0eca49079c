"""Logits and perplexity of one checkpoint as quantkit's own runtime computes them, in the form of loader_logits.py.

    python our_logits.py CHECKPOINT OUT.npz --ids IDS.json [--dtype float32]

For checkpoints of other tools: compare_logits.py against what their own loader says.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from loader_logits import perplexity

from quantkit.runtime.llm import LLM


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--ids", required=True)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    text = json.loads(Path(options.ids).read_text())["text"]
    model = LLM(options.checkpoint, dtype=options.dtype, kv_cache="auto")
    logits = [rows.float().numpy() for rows in model.score(text)]
    result = perplexity(logits, text)
    np.savez_compressed(
        options.output, texts=np.array([]), perplexity=result, **{f"logits{i}": rows for i, rows in enumerate(logits)}
    )
    print(f"quantkit {options.checkpoint}: perplexity {result:.5f}")


if __name__ == "__main__":
    main()
