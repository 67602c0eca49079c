"""Logits, perplexity and greedy text of one checkpoint, as each loader of the ecosystem computes them.

    python loader_logits.py ids MODEL TEXT IDS.json                    # windows of a text and prompts, as token ids
    python loader_logits.py run CHECKPOINT OUT.npz --ids IDS.json --with transformers|gptqmodel|llama.cpp|quantkit
    python loader_logits.py compare LEFT.npz RIGHT.npz                 # differences of logits, perplexities and texts

Call `run` with the interpreter of each loader's environment; only `--with quantkit` needs quantkit there.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

NEW_TOKENS = 50
PROMPTS, WINDOWS, LENGTH = 20, 16, 128
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


def with_quantkit(checkpoint: str, dtype: str) -> tuple[Forward, Greedy]:
    """quantkit's own engine, which reads checkpoints of other tools too."""
    from quantkit import LLM, SamplingParams

    model = LLM(checkpoint, dtype=dtype, kv_cache="auto", threads=1)

    def forward(ids: list[int]) -> np.ndarray:
        return model.score([ids])[0].float().numpy()

    def greedy(prompt: list[int]) -> list[int]:
        return list(model.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))[0].token_ids)

    return forward, greedy


LOADERS = {
    "transformers": with_transformers,
    "gptqmodel": with_gptqmodel,
    "llama.cpp": with_llama_cpp,
    "quantkit": with_quantkit,
}


def perplexity(logits: list[np.ndarray], text: list[list[int]]) -> float:
    """Perplexity over every token but the first of each window."""
    total, count = 0.0, 0
    for rows, ids in zip(logits, text, strict=True):
        rows = rows[:-1].astype(np.float64)
        top = rows.max(1)
        norm = top + np.log(np.exp(rows - top[:, None]).sum(1))
        total += float((norm - rows[np.arange(len(ids) - 1), ids[1:]]).sum())
        count += len(ids) - 1
    return math.exp(total / count)


def write_ids(options: argparse.Namespace) -> None:
    """Write IDS.json: {"text": [[token ids], ...], "prompts": [[token ids], ...]}."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = Path(options.text).read_text(encoding="utf-8")[:400_000]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer("", add_special_tokens=True)["input_ids"]
    length = LENGTH - len(start)
    windows = [start + ids[i * length : (i + 1) * length] for i in range(WINDOWS)]
    step = len(ids) // PROMPTS
    prompts = [start + ids[i * step : i * step + 16] for i in range(PROMPTS)]
    Path(options.output).write_text(json.dumps({"text": windows, "prompts": prompts}))


def run(options: argparse.Namespace) -> None:
    """Compute logits, perplexity and texts with one loader."""
    ids = json.loads(Path(options.ids).read_text())
    forward, greedy = LOADERS[options.loader](options.checkpoint, options.dtype)
    logits = [forward(tokens) for tokens in ids["text"]]
    texts = [] if options.no_text else [greedy(prompt) for prompt in ids["prompts"]]
    result = perplexity(logits, ids["text"])
    arrays = {f"logits{i}": rows for i, rows in enumerate(logits)}
    np.savez_compressed(options.output, texts=np.array(texts), perplexity=result, **arrays)
    print(f"{options.loader} {options.checkpoint}: perplexity {result:.5f}")


def compare(options: argparse.Namespace) -> None:
    """Print the differences between two outputs of `run`."""
    left, right = np.load(options.left), np.load(options.right)
    names = [name for name in left.files if name.startswith("logits")]
    differences = np.concatenate([(left[name] - right[name]).ravel() for name in names])
    spread = np.concatenate([left[name].ravel() for name in names]).std()
    same = sum(bool((a == b).all()) for a, b in zip(left["texts"], right["texts"], strict=False))
    ratio = float(right["perplexity"]) / float(left["perplexity"]) - 1
    print(
        f"logits: max {np.abs(differences).max():.2e} rms {np.sqrt((differences**2).mean()):.2e} "
        f"(spread {spread:.2f}); "
        f"perplexity {float(left['perplexity']):.5f} {float(right['perplexity']):.5f} ({ratio:+.4%}); "
        f"greedy texts equal {same}/{len(left['texts'])}"
    )


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    ids = commands.add_parser("ids")
    for name in ("model", "text", "output"):
        ids.add_argument(name)
    ids.set_defaults(command=write_ids)
    one = commands.add_parser("run")
    one.add_argument("checkpoint")
    one.add_argument("output")
    one.add_argument("--ids", required=True)
    one.add_argument("--with", dest="loader", choices=LOADERS, required=True)
    one.add_argument("--dtype", default="float32")
    one.add_argument("--no-text", action="store_true", help="logits and perplexity only")
    one.set_defaults(command=run)
    two = commands.add_parser("compare")
    two.add_argument("left")
    two.add_argument("right")
    two.set_defaults(command=compare)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
