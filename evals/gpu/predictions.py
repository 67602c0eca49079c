"""What the rows of a short call should show on an H100, said before the first run: rooflines, and what they assume.

    python evals/gpu/predictions.py [--write]     predictions.json; without --write, whether that is what this gives

A time is that of the bytes at the rate of a copy, or of the arithmetic at the rate of a large product, whichever is
longer, plus launches. Bytes and launches of a step are counted (`step_count`). Nothing in a kernel is modelled, so a
kernel that is slower than its prediction has something to gain. `results.py` writes a prediction into the row with the
same labels as `predicted_<figure>`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attention import DECODE, KV_TYPES, PAGE, SDPA, Case
from end_to_end import SHORT_PLAN, kv_bytes
from linears import KINDS, PLAN, SHAPES
from peer import BATCHES
from quantization import LAYERS
from random_model import SHAPES as MODELS
from step_count import count_step

PATH = Path(__file__).with_name("predictions.json")
COPY = 3.0e12
GEMM = 798e12
FP32 = 50e12
NODE_US = 1.3
HOST_US = 6.0
ASSUMPTIONS = (
    "H100 SXM: a copy moves 3.0 TB/s, counting reads and writes, and a large bf16 product reaches 798 TFLOP/s; both "
    "were observed on such a machine",
    "float32 products reach 50 of the 67 TFLOP/s of the data sheet",
    "a node of a CUDA graph costs 1.3 µs besides its work; a launch from Python through torch or Triton costs 6 µs",
    "transformers launches 30 kernels per layer, at 20 µs of Python each",
    "GPTQ runs each layer ten times (two models, four groups of linears and the output), sums two float32 Gram "
    "matrices per group, and launches 6 kernels per column",
    "a stage of the main job spends its time on starting and on reading and writing files; its arithmetic takes under "
    "a second",
)
# Seconds of a stage by model; see the last assumption.
STAGES = {"demo": {"quantize": 3, "text": 3, "verify": 3}, "8B, 2 layers": {"quantize": 8, "text": 6, "verify": 6}}
Row = dict[str, Any]


def _row(file: str, labels: Row, **figures: float) -> Row:
    return {"file": file, "labels": labels, "figures": {key: float(f"{value:.3g}") for key, value in figures.items()}}


def smoke() -> Iterator[Row]:
    """Loads: four processes import torch at once; verdicts are then read from a file."""
    yield _row("smoke", {"kind": "first load"}, seconds=20)
    yield _row("smoke", {"kind": "second load"}, seconds=0.05)


def main_job() -> Iterator[Row]:
    """Stages of the main job."""
    for model, stages in STAGES.items():
        for recipe in ("awq-int4", "gptq-int4"):
            for stage, seconds in stages.items():
                yield _row("main_job", {"model": model, "recipe": recipe, "stage": stage}, seconds=seconds)


def steps() -> Iterator[Row]:
    """Decode steps of the 8B shape: every weight and every key once, or the launches."""
    for weights, cases in SHORT_PLAN:
        for kv, batch, context in cases:
            count, model = count_step("8B", weights, kv, batch, context)
            moved = model.stored_bytes + kv_bytes(model.layouts(kv, PAGE), batch, context)
            flops = 2.0 * batch * _parameters("8B")
            work = max(moved / COPY, flops / GEMM) * 1e3
            graph, eager = work + len(count.calls) * NODE_US / 1e3, len(count.calls) * HOST_US / 1e3
            yield _row(
                "end_to_end",
                {"part": "step", "weights": weights, "kv": kv, "batch": batch, "context": context},
                eager_ms=max(eager, graph),
                graph_ms=graph,
                tokens_per_s=batch / graph * 1e3,
                share_of_copy=moved / graph / 1e-3 / COPY,
                launches_per_layer=count.per_layer,
            )


def _parameters(shape: str) -> float:
    """Weights of the linears of a shape, the head included."""
    config = MODELS[shape]
    hidden, keys = config["hidden_size"], config["num_key_value_heads"] / config["num_attention_heads"]
    layer = hidden * (hidden * (2 + 2 * keys) + 3 * config["intermediate_size"])
    return float(config["num_hidden_layers"] * layer + hidden * config["vocab_size"])


def peers() -> Iterator[Row]:
    """Steps of transformers: its launches, or every weight once."""
    for batch in BATCHES:
        step = max(2 * _parameters("8B") / COPY * 1e3, LAYERS * 30 * 0.02)
        labels = {"kind": "transformers generate", "weights": "bf16", "batch": batch, "context": 1024}
        yield _row("peer", labels, step_ms=step, tokens_per_s=batch / step * 1e3)


def products() -> Iterator[Row]:
    """The first entry of the plan of linears."""
    shapes, kinds, rows = PLAN[0]
    for shape in shapes:
        n, k = SHAPES[shape]
        for kind in kinds:
            # 4 bits have a scale of 16 bits per 128.
            size = n * k * (KINDS[kind][1] + (2 / 128 if "g128" in kind else 0))
            for m in rows:
                us = max((size + 2 * m * (n + k)) / COPY, 2 * m * n * k / GEMM) * 1e6 + NODE_US
                yield _row("linears", {"shape": shape, "n": n, "k": k, "m": m, "kind": kind}, us=us)


def attention() -> Iterator[Row]:
    """The first case of decode attention: keys and values once."""
    case = Case(*DECODE[0])
    sizes = {"auto": 2.0, "int8": 1.03, "fp8": 1.0, "int4": 0.53}
    for kind in (*KV_TYPES, SDPA):
        us = case.kv_bytes / 2 * sizes.get(kind, 2.0) / COPY * 1e6 + NODE_US
        label = "quantkit bf16" if kind == "auto" else kind if kind == SDPA else f"quantkit {kind}"
        yield _row("attention", {"batch": case.batch, "context": case.context, "new": case.new, "kind": label}, us=us)


def gptq() -> Iterator[Row]:
    """One layer of the 8B shape over 128 sequences of 2048 tokens."""
    config, tokens = MODELS["8B"], 128 * 2048
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    layer = (_parameters("8B") - hidden * config["vocab_size"]) / config["num_hidden_layers"]
    passes, grams = 10 * 2 * layer * tokens / GEMM, 2 * 2 * tokens * (3 * hidden**2 + wide**2) / FP32
    seconds = passes + grams + (6 * hidden + wide) * 6 * HOST_US / 1e6
    yield _row("quantization", {"kind": "gptq-int4 g128"}, layer_seconds=seconds, model_minutes=LAYERS * seconds / 60)


def predictions() -> str:
    """The file."""
    rows = [row for part in (smoke, main_job, steps, peers, products, attention, gptq) for row in part()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    said = json.dumps(list(ASSUMPTIONS), indent=2, ensure_ascii=False)
    return f'{{"device": "NVIDIA H100", "assumptions": {said},\n "rows": [\n{lines}\n ]}}\n'


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name}")
    text = predictions()
    if parser.parse_args().write:
        PATH.write_text(text, encoding="utf-8")
    elif not PATH.exists() or PATH.read_text(encoding="utf-8") != text:
        sys.exit(f"{PATH.name} is not what this program gives: python evals/gpu/predictions.py --write")


if __name__ == "__main__":
    main()
