"""Logits, perplexity and greedy text of one checkpoint, as one loader of the ecosystem computes them.

Run it once in each loader's environment and compare the outputs with compare_logits.py:

    python loader_logits.py CHECKPOINT OUT.pt --ids IDS.json --with transformers|gptqmodel|llama.cpp

IDS.json: {"text": [[token ids], ...], "prompts": [[token ids], ...]}, made by make_token_ids.py. Needs no quantkit.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

NEW_TOKENS = 50
Forward = Callable[[list[int]], np.ndarray]
Greedy = Callable[[list[int]], list[int]]


def with_transformers(checkpoint: str, dtype: str) -> tuple[Forward, Greedy]:
    """Plain transformers, whatever format it reads."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), device_map="cpu").eval()
    return _torch_forward(model)


def with_gptqmodel(checkpoint: str, dtype: str) -> tuple[Forward, Greedy]:
    """GPTQModel, its plain torch kernels."""
    import torch
    from gptqmodel import BACKEND, GPTQModel

    section = json.loads((Path(checkpoint) / "config.json").read_text())["quantization_config"]
    backend = BACKEND.AWQ_TORCH if section["quant_method"] == "awq" else BACKEND.TORCH
    model = GPTQModel.load(checkpoint, device="cpu", backend=backend, dtype=getattr(torch, dtype))
    return _torch_forward(model.model)


def _torch_forward(model: object) -> tuple[Forward, Greedy]:
    import torch

    torch.set_num_threads(1)

    def forward(ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids])).logits[0].float().numpy()  # type: ignore[operator]

    def greedy(prompt: list[int]) -> list[int]:
        settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1}
        ids = torch.tensor([prompt])
        # Without a mask, a model whose padding is its first token would not see that token.
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore[attr-defined]
        return found[0, len(prompt) :].tolist()

    return forward, greedy


def with_llama_cpp(checkpoint: str, dtype: str) -> tuple[Forward, Greedy]:
    """llama.cpp by its Python binding."""
    import llama_cpp

    model = llama_cpp.Llama(
        checkpoint, n_ctx=256, n_batch=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
    )

    def forward(ids: list[int]) -> np.ndarray:
        model.reset()
        model.eval(ids)
        return np.array(model.scores[: len(ids)], dtype=np.float32)

    def greedy(prompt: list[int]) -> list[int]:
        model.reset()
        model.eval(prompt)
        found: list[int] = []
        while len(found) < NEW_TOKENS:
            found.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(found[-1:])
        return found

    return forward, greedy


LOADERS = {"transformers": with_transformers, "gptqmodel": with_gptqmodel, "llama.cpp": with_llama_cpp}


def perplexity(logits: list[np.ndarray], text: list[list[int]]) -> float:
    """Of every token of every window but its first."""
    total, count = 0.0, 0
    for rows, ids in zip(logits, text, strict=True):
        rows = rows[:-1].astype(np.float64)
        top = rows.max(1)
        norm = top + np.log(np.exp(rows - top[:, None]).sum(1))
        total += float((norm - rows[np.arange(len(ids) - 1), ids[1:]]).sum())
        count += len(ids) - 1
    return math.exp(total / count)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--ids", required=True)
    parser.add_argument("--with", dest="loader", choices=LOADERS, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-text", action="store_true", help="logits and perplexity only")
    options = parser.parse_args()
    ids = json.loads(Path(options.ids).read_text())
    forward, greedy = LOADERS[options.loader](options.checkpoint, options.dtype)
    logits = [forward(tokens) for tokens in ids["text"]]
    texts = [] if options.no_text else [greedy(prompt) for prompt in ids["prompts"]]
    result = perplexity(logits, ids["text"])
    np.savez_compressed(
        options.output,
        texts=np.array(texts),
        perplexity=result,
        **{f"logits{i}": rows for i, rows in enumerate(logits)},
    )
    print(f"{options.loader} {options.checkpoint}: perplexity {result:.5f}")


if __name__ == "__main__":
    main()
