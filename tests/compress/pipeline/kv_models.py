"""The demo model as a Qwen2 whose keys have outlier channels, though it computes what the demo model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).parents[3] / "quantkit" / "demo"
HEADS, KV_HEADS, WIDTH, LAYERS = 8, 4, 64, 4
GROWTH = 256.0
"""A power of two, by which keys of some channels grow and their queries shrink: exactly neutral in floats."""


def plant_outliers(folder: Path, layers: tuple[int, ...] = (1, 2), pair: int = 5) -> Path:
    """Write the demo model as Qwen2 with one pair of rotated channels of every key head blown up, and a large bias.

    The pair of channels is one that the rotary embedding turns together, and its two channels grow alike, so that
    rotation and growth commute. The bias stands on the pair that rotates slowest and is blown up as well; divided by
    its growth it adds the same to all scores of a query but for that rotation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = DEMO / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32"}
    for key in ("attention_bias", "mlp_bias", "pretraining_tp", "head_dim"):
        config.pop(key, None)
    config["head_dim"] = WIDTH
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.float() for name, value in load_file(source / "model.safetensors").items()}
    for index in range(LAYERS):
        prefix = f"model.layers.{index}.self_attn"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}.{name}_proj.bias"] = torch.zeros(heads * WIDTH)
        if index not in layers:
            continue
        slowest = WIDTH // 2 - 1
        for first in (pair, slowest):
            for channel in (first, first + WIDTH // 2):
                tensors[f"{prefix}.q_proj.weight"].view(HEADS, WIDTH, -1)[:, channel] /= GROWTH
                tensors[f"{prefix}.k_proj.weight"].view(KV_HEADS, WIDTH, -1)[:, channel] *= GROWTH
        tensors[f"{prefix}.k_proj.bias"].view(KV_HEADS, WIDTH)[:, slowest] = 0.5 * GROWTH
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def perplexity(llm: Any, windows: int = 4, length: int = 160, chunk: int = 8) -> float:
    """Of the end of the demo model's text, read through the cache in chunks."""
    text = (DEMO / "calibration.txt").read_text(encoding="utf-8")[-6000:]
    ids, step = llm.encode(text)[1:], length - 1
    given = [[llm.tokenizer.bos_token_id, *ids[n * step : (n + 1) * step]] for n in range(windows)]
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]))
        for window, logits in zip(given, llm.score(given, chunk_size=chunk), strict=True)
    ]
    return torch.stack(losses).mean().exp().item()
