"""transformers' own quantized KV cache, with quanto and HQQ, on the windows that `evals/checks/kv_types.py` reads.

    PYTHON_OF_PEERS evals/peers/kv_caches.py MODEL TEXT [-o evals/results/kv_types/peers-NAME.json]

The environment needs torch, transformers, hqq and optimum-quanto, but not quantkit. In float32, token by token, beside
a cache in the model's dtype. Groups of 64 with a scale and a zero point, and 128 unquantized tokens, are its defaults.
Models with sliding windows are refused by transformers.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

WINDOW, WINDOWS = 512, 8
# Axis 0 quantizes per token, and HQQ's authors advise axis 1, per channel.
TYPES: dict[str, dict[str, Any]] = {
    "quanto int4": {"backend": "quanto", "nbits": 4},
    "quanto int2": {"backend": "quanto", "nbits": 2},
    "HQQ int8": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "HQQ int4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "HQQ int3": {"backend": "hqq", "nbits": 3, "axis_key": 1, "axis_value": 1},
    "HQQ int2": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
}


@torch.inference_mode()
def main() -> None:
    """Measure each type, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    output = given.output or Path(__file__).parents[1] / f"results/kv_types/peers-{given.model.name}.json"
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    bos = tokenizer("", add_special_tokens=True)["input_ids"][:1]
    ids, own = (
        tokenizer(given.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"],
        WINDOW - len(bos),
    )
    windows = torch.tensor([[*bos, *ids[start : start + own]] for start in range(0, WINDOWS * own, own)])
    rows = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for kind in given.types.split(","):
        if kind in rows:
            continue
        rows[kind] = {**measure(model, windows, TYPES[kind]), "versions": versions(), "settings": TYPES[kind]}
        print(kind, rows[kind], flush=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measure(model: Any, windows: torch.Tensor, settings: dict[str, Any]) -> dict[str, float]:
    """KL to the model with an unquantized cache, and perplexities of both."""
    caches = DynamicCache(config=model.config), QuantizedCache(config=model.config, **settings)
    kl, ours, theirs = 0.0, 0.0, 0.0
    for position in range(WINDOW):
        before, after = (
            model(windows[:, position : position + 1], past_key_values=cache).logits[:, -1].log_softmax(-1)
            for cache in caches
        )
        kl += float((before.exp() * (before - after)).sum())
        if position + 1 < WINDOW:
            following = windows[:, position + 1, None]
            ours, theirs = (
                ours - float(before.gather(1, following).sum()),
                theirs - float(after.gather(1, following).sum()),
            )
    scored = torch.tensor(len(windows) * (WINDOW - 1))
    return {
        "kl": kl / windows.numel(),
        "perplexity": float((theirs / scored).exp()),
        "original_perplexity": float((ours / scored).exp()),
    }


def versions() -> dict[str, str]:
    """Of the libraries that compute."""
    return {name: version(name) for name in ("torch", "transformers", "hqq", "optimum-quanto")}


if __name__ == "__main__":
    main()
