"""Perplexity through the decode path, and recall, with every number type of the KV cache.

    python evals/checks/kv_quality.py MODEL TEXT [--windows 40] [--window 256] [--chunk 8] [--recall]

Each window is fed through the cache in chunks of --chunk tokens (1 = the decode path itself), so that all but the
newest keys and values are read back from their pages. --recall adds the demo language's key-value recall test,
answered by decoding.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

from quantkit import LLM

TYPES = ("auto", "int8", "fp8", "int4")
RECALL = Path(__file__).parents[1] / "tasks/demo/demo_recall.jsonl"


def main() -> None:
    """Print one line per number type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory, or 'demo' for the bundled one")
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--recall", action="store_true")
    options = parser.parse_args()
    base = None
    for kind in TYPES:
        path = None if options.model == "demo" else options.model
        llm = LLM(path, dtype="float32", kv_cache="fp32" if kind == "auto" else kind, page_size=options.page_size)
        perplexity = score(llm, options)
        base = base or perplexity
        line = f"{kind:5} perplexity {perplexity:.4f}  {100 * (perplexity / base - 1):+.3f} %"
        line += f"  {llm.kv_bytes_per_token:.0f} bytes/token"
        if options.recall:
            line += f"  recall {100 * recall(llm):.1f} %"
        print(line, flush=True)


def score(llm: LLM, options: argparse.Namespace) -> float:
    """exp of the mean negative log-likelihood over the windows; BOS in front of each."""
    tokenizer = llm.tokenizer
    ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    step = options.window - 1
    windows = [[tokenizer.bos_token_id, *ids[n * step : (n + 1) * step]] for n in range(options.windows)]
    total, count = 0.0, 0
    for start in range(0, len(windows), 8):
        some = [window for window in windows[start : start + 8] if len(window) == options.window]
        if not some:
            continue
        for window, logits in zip(some, llm.score(some, chunk_size=options.chunk), strict=True):
            losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="none")
            total, count = total + losses.double().sum().item(), count + len(losses)
    return math.exp(total / count)


def recall(llm: LLM) -> float:
    """Share of recall items whose first choice token, greedily decoded, is the right answer's."""
    from quantkit import SamplingParams

    items = [json.loads(line) for line in RECALL.read_text(encoding="utf-8").splitlines()]
    prompts = [llm.encode(item["context"]) for item in items]
    answers = [item["choices"][item["answer"]] for item in items]
    longest = max(len(llm.encode(text)) for text in answers)
    done = llm.generate(prompts, SamplingParams(max_tokens=longest))
    return sum(c.text.strip().startswith(a.strip()) for c, a in zip(done, answers, strict=True)) / len(items)


if __name__ == "__main__":
    main()
