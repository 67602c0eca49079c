"""What each number type of the KV cache costs: distance from a 16-bit cache, facts found in long texts, and speed.

    python evals/checks/kv_types.py MODEL TEXT [--types auto,fp8,int8,int4] [--tokens 2000] [--threads 1]
        [--recall 4096] [--speed 4096] [-o evals/results/kv_types/NAME.json]

Distances are measured in float32 on windows of 512 tokens, once token by token as in decoding and once in steps of 256
tokens as in prefill, and along texts that the model itself has sampled. `--recall` and `--speed` measure with prompts
of this length in the model's dtype instead; run `--speed` on a quiet machine.

A type `mix=FOLDER` is the cache of a checkpoint of MODEL, whose recipe has only `kv_cache:` (refused otherwise). The
weights are the model's own, so all that is measured comes from the cache. FILE is written after each type, and what it
has is not measured again, so a killed run goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import plain, stamp, write_json

from quantkit import SamplingParams
from quantkit.evaluate.drift import drift_result
from quantkit.evaluate.fidelity import Distances, Windows, distances, fixed_windows
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.long_context import long_context
from quantkit.evaluate.tasks import LongContext
from quantkit.kernels.layouts import page_bytes
from quantkit.models.kv_sizes import KV_TYPES
from quantkit.runtime.llm import LLM

WINDOW, WINDOWS, TEXTS, PROMPT, PREFILL = 512, 8, 4, 32, 256
KINDS = ("passkey", "multikey", "multivalue", "variables", "words")
DEPTHS, SAMPLES, ROUNDS, STEPS = (0.1, 0.5, 0.9), 4, 3, 32


def main() -> None:
    """Measure, keep, and print one line per type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--types", default="auto,fp8,int8,int4,k4v2,k3v2")
    parser.add_argument("--tokens", type=int, default=2000, help="along which drift is measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recall", type=int, metavar="LENGTH")
    parser.add_argument("--speed", type=int, metavar="LENGTH")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    output = given.output or Path(__file__).parents[1] / f"results/kv_types/{given.model.name}.json"
    field = "recall" if given.recall else "speed" if given.speed else "distance"
    folders = {kind: folder for kind, _, folder in (each.partition("=") for each in given.types.split(","))}
    for kind, folder in folders.items():
        if folder and (kind in KV_TYPES or "weights" in read_manifest(folder)["recipe"]):
            parser.error(f"{kind}={folder}: needs a name of its own, and a checkpoint that changes only the cache")
    todo = [kind for kind in folders if field not in read_rows(output).get(kind, {})]
    dtype = None if given.recall or given.speed else "fp32"

    def load(kind: str, **settings: Any) -> LLM:
        path, cache = (folders[kind], None) if folders.get(kind) else (str(given.model), kind)
        return load_llm(path, threads=given.threads, kv_cache=cache, dtype=dtype, token_budget=PREFILL, **settings)

    if given.recall:
        found = ((kind, recall(load(kind, max_sequences=4), given.recall)) for kind in todo)
    elif given.speed:
        found = iter(speeds({kind: load(kind, max_sequences=1) for kind in todo}, given.speed).items())
    else:
        found = all_distances(todo, load, given.text.read_text(encoding="utf-8"), given.tokens)
    for kind, value in found:
        keep(output, kind, field, {**value, "about": {**plain(stamp()), "dtype": dtype or "the model's"}})
        print(kind, value, flush=True)


def read_rows(output: Path) -> dict[str, dict[str, Any]]:
    """What has been measured, keyed by type."""
    return dict(json.loads(output.read_text(encoding="utf-8"))) if output.exists() else {}


def keep(output: Path, kind: str, field: str, value: dict[str, Any]) -> None:
    """Add what was measured to the file, which another process may have changed meanwhile."""
    rows = read_rows(output)
    rows.setdefault(kind, {})[field] = value
    write_json(output, rows)


def read_manifest(folder: str) -> dict[str, Any]:
    """What the checkpoint says about itself."""
    return dict(json.loads((Path(folder) / "quantkit.json").read_text(encoding="utf-8")))


def all_distances(todo: list[str], load: Any, text: str, tokens: int) -> Any:
    """Yield the distances of each type. The original reads every text once; its logits wait in a file meanwhile."""
    original = load("auto")
    windows = fixed_windows(original, text, window=WINDOW, max_tokens=WINDOW * WINDOWS)
    prompts = [list(window[:PROMPT]) for window in windows[:TEXTS]]
    params = [SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(TEXTS)]
    written = [done.token_ids for done in original.generate(prompts, params)]
    # The logits after a token are those of the next one, so nothing is measured after the last token.
    traces = tuple((*prompt, *ids[:-1]) for prompt, ids in zip(prompts, written, strict=True))
    print("the original has written", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        on_windows = read_once(original, windows, Path(folder) / "windows")
        on_traces = read_once(original, traces, Path(folder) / "traces")
        for kind in todo:
            llm = original if kind == "auto" else load(kind)
            decoded, prefilled = (compare(llm, windows, on_windows, size) for size in (1, PREFILL))
            along = compare(llm, traces, on_traces, 1)
            parts = [Distances(kl=kl[PROMPT - 1 :], agrees=same[PROMPT - 1 :]) for kl, same, _ in along]
            yield (
                kind,
                {
                    **sizes(llm),
                    "window": WINDOW,
                    "kl": float(torch.cat([kl for kl, _, _ in decoded]).double().mean()),
                    "perplexity": perplexity(decoded),
                    "prefill_kl": float(torch.cat([kl for kl, _, _ in prefilled]).double().mean()),
                    "prefill_perplexity": perplexity(prefilled),
                    "drift": drift_result(parts, tokens).to_dict(),
                },
            )


def read_once(llm: LLM, texts: Windows, file: Path) -> list[Tensor]:
    """The logits after every token, (T, V) float32 per text, in a file."""
    length = max(map(len, texts))
    shape = (len(texts), length, llm.vocab_size)
    kept = torch.from_file(str(file), shared=True, size=len(texts) * length * llm.vocab_size).view(shape)
    filled = [0] * len(texts)
    for index, rows in llm.score_rows(texts, chunk_size=1):
        kept[index, filled[index] : filled[index] + len(rows)] = rows
        filled[index] += len(rows)
    return [each[: len(ids)] for each, ids in zip(kept, texts, strict=True)]


def compare(llm: LLM, texts: Windows, reference: list[Tensor], size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """KL, agreement and the loss of the next token at every position of each text, computed `size` tokens at a time."""
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in texts]
    filled = [0] * len(texts)
    for index, rows in llm.score_rows(texts, chunk_size=size):
        start, filled[index] = filled[index], filled[index] + len(rows)
        near = distances(reference[index][start : filled[index]], rows)
        following = torch.tensor(texts[index][start + 1 : filled[index] + 1], dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(rows[: len(following)], following, reduction="none")
        found[index].append((near.kl, near.agrees, loss))
    return [tuple(torch.cat(each) for each in zip(*parts, strict=True)) for parts in found]  # type: ignore[misc]


def perplexity(parts: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Of all next tokens."""
    return float(torch.cat([loss for _, _, loss in parts]).double().mean().exp())


def sizes(llm: LLM) -> dict[str, float]:
    """Bytes of a token in the layers that the type can quantize, of 16 bits; tokens per GiB of all layers, if those
    that are not quantized have 16 bits.
    """
    cache = llm.engine.runner.cache
    assert cache is not None
    quantized, layers = 0.0, 0.0
    for layout in cache.layouts:
        own = page_bytes([layout]) / cache.page_size
        layers += own if layout.scheme.is_quantized else own * 2 / layout.dtype.itemsize
        if layout.scheme.is_quantized:
            quantized += own / (4 * layout.num_heads * layout.head_dim)
    count = sum(layout.scheme.is_quantized for layout in cache.layouts)
    return {"size": quantized / count if count else 1.0, "tokens_per_gib": round((1 << 30) / layers)}


def recall(llm: LLM, length: int) -> dict[str, Any]:
    """The share of facts that the model finds, per kind of text, and its answers."""
    results = long_context(llm, LongContext(lengths=(length,), depths=DEPTHS, samples=SAMPLES, kinds=KINDS), say=print)
    return {
        "length": length,
        "found": {kind: result.value for kind, result in zip(KINDS, results, strict=True)},
        "answers": {
            kind: [each.answer for each in result.samples] for kind, result in zip(KINDS, results, strict=True)
        },
    }


def speeds(llms: dict[str, LLM], length: int) -> dict[str, dict[str, Any]]:
    """Tokens per second of decoding after a prompt of this length, the median of rounds in turns."""
    prompt = [3 + 7 * index % 250 for index in range(length)]
    found: dict[str, list[float]] = {kind: [] for kind in llms}
    for _ in range(ROUNDS):
        for kind, llm in llms.items():
            (done,) = llm.generate([prompt], SamplingParams(max_tokens=STEPS, ignore_eos=True))
            assert done.timing.inter_token_s
            found[kind].append(1 / statistics.median(done.timing.inter_token_s))
    return {
        kind: {"length": length, "decode": round(statistics.median(rates), 2), "rounds": rates}
        for kind, rates in found.items()
    }


if __name__ == "__main__":
    main()
