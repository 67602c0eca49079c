"""Perplexity through the decode path, and recall, with every number type of the KV cache, and with recipes' schemes.

    python evals/checks/kv_quality.py MODEL TEXT [--windows 40] [--window 256] [--chunk 8] [--recall]
    python evals/checks/kv_quality.py MODEL TEXT --schemes [--calibration FILE] [--samples 32]

Each window is fed through the cache in chunks of --chunk tokens (1 = the decode path itself), so that all but the
newest keys and values are read back from their pages. --recall adds the demo language's key-value recall test,
answered by decoding. --schemes compresses the KV cache of the model by recipes that leave the weights alone, calibrated
on a text other than the one that is scored, and runs what was written.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from quantkit import LLM

TYPES = ("auto", "int8", "fp8", "int4")
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8 per tensor": {"dtype": "fp8"},
    "fp8 per tensor, mse": {"dtype": "fp8", "clip": "mse"},
    "fp8 per head": {"dtype": "fp8", "granularity": "head"},
    "fp8 per token": {"dtype": "fp8", "granularity": "token", "outliers": "off"},
    "int8 per token": {"dtype": "int8", "outliers": "off"},
    "int4 per token": {"dtype": "int4", "granularity": "token", "outliers": "off"},
    "int4 per token, outliers found": {"dtype": "int4", "granularity": "token"},
    "int4 hadamard": {"dtype": "int4", "rotation": "hadamard", "outliers": "off"},
    "int4 hadamard, outliers found": {"dtype": "int4", "rotation": "hadamard"},
    "int4 keys per channel": {"dtype": "int4"},
    "int4 keys per channel, int8 values": {"dtype": "int4", "values": {"dtype": "int8"}},
}
RECALL = Path(__file__).parents[1] / "tasks/demo/demo_recall.jsonl"


def main() -> None:
    """Print one line per number type, or per scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory, or 'demo' for the bundled one")
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--recall", action="store_true")
    parser.add_argument("--schemes", action="store_true")
    parser.add_argument("--calibration", default="bundled", help="text that scales are found on")
    parser.add_argument("--samples", type=int, default=32)
    options = parser.parse_args()
    path = None if options.model == "demo" else options.model
    base = report("unquantized", load(path, "fp32", options), None, options)
    if not options.schemes:
        for kind in TYPES[1:]:
            report(kind, load(path, kind, options), base, options)
        return
    report("fp8, scales of 1", load(path, "fp8", options), base, options)
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, section) in enumerate(SCHEMES.items()):
            made = compress(path, section, Path(folder) / str(number), options)
            report(name, load(made, "auto", options), base, options)


def load(path: str | Path | None, kind: str, options: argparse.Namespace) -> LLM:
    """The model in float32 with a number type of the cache."""
    return LLM(path, dtype="float32", kv_cache=kind, page_size=options.page_size)


def compress(path: str | None, section: dict[str, Any], output: Path, options: argparse.Namespace) -> Path:
    """A checkpoint of the same weights with this `kv_cache:`."""
    from quantkit.compress.pipeline import quantize
    from quantkit.compress.recipe.load import build

    data: dict[str, Any] = {"name": "kv", "kv_cache": section}
    if section.get("outliers") != "off":
        sizes = {"samples": options.samples, "sequence_length": options.window}
        data["calibration"] = {"data": options.calibration, **sizes}
    quantize(path, build(data, "kv_quality"), output)
    return output


def report(name: str, llm: LLM, base: float | None, options: argparse.Namespace) -> float:
    """Print perplexity, its change, and bytes; the perplexity."""
    perplexity = score(llm, options)
    line = f"{name:34} perplexity {perplexity:.4f}  {100 * (perplexity / (base or perplexity) - 1):+.3f} %"
    line += f"  {llm.kv_bytes_per_token:.0f} bytes/token"
    if options.recall:
        line += f"  recall {100 * recall(llm):.1f} %"
    print(line, flush=True)
    return perplexity


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
