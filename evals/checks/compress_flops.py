"""Arithmetic of a calibrated compression against what its method needs: multiplications are counted, nothing is timed.

    python evals/checks/compress_flops.py [--recipe gptq-int4] [--layers 3] [--samples 16] [--length 256]

Quantizes a random Llama and counts the products that calibration data go through: the layers' own and those of the
statistics of their inputs, but not what is computed from these statistics. Needed are, for each layer: each linear and
attention once for the model being quantized, and once more for the original where a step compares with it; half of the
Gram matrix of each set's inputs; its cross Gram. Nothing reads what the last layer's last linear gives. Exit code 1:
the ratio is above 1.3.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import make_random_llama
import torch
from torch.utils.flop_counter import FlopCounterMode

from quantkit.compress.algorithms.base import needs_original
from quantkit.compress.algorithms.gptq import GptqStep
from quantkit.compress.pipeline.plan import Plan, build_plan
from quantkit.compress.pipeline.run import quantize
from quantkit.compress.recipe import load

LIMIT = 1.3
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 2}
aten = torch.ops.aten


def product(left: Any, right: Any) -> int:
    """Operations of a product of matrices of these shapes, or of as many as come first."""
    return 2 * math.prod(left) * right[-1]


# Products that the counter does not know under these names; they are given shapes.
OTHERS = {
    aten.addmm_: lambda _, left, right, **__: product(left, right),
    aten.baddbmm_: lambda _, left, right, **__: product(left, right),
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, *_, **__: 4 * math.prod(query) * key[-2],
}


def main() -> int:
    """Make the model, quantize it, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="gptq-int4")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, output = Path(folder) / "model", Path(folder) / "out"
        make_random_llama.SHAPES["asked"] = {**SHAPE, "num_hidden_layers": options.layers}
        make_random_llama.make(model, "asked")
        changes = [f"calibration.samples={options.samples}", f"calibration.sequence_length={options.length}"]
        recipe = load(options.recipe, [*changes, "calibration.data=bundled"])
        plan = build_plan(str(model), recipe, output, "cpu")
        needed = sum(needs(plan, options.samples, options.length).values())
        done = count(lambda: quantize(str(model), recipe, output, device="cpu"))
    print(f"{recipe.name}: GFLOP done {done / 1e9:.1f}, needed {needed / 1e9:.1f}: {done / needed:.2f} (limit {LIMIT})")
    return 0 if done <= LIMIT * needed else 1


def needs(plan: Plan, samples: int, length: int) -> Counter[str]:
    """Operations by purpose; a product and a sum are two."""
    tokens, streams = samples * length, 2 if needs_original(plan.recipe.steps.values()) else 1
    total: Counter[str] = Counter()
    for index in range(plan.skeleton.num_layers):
        shapes, sets = plan.skeleton.linear_shapes(index), plan.sets(index)
        last = sets[-1].linears if index + 1 == plan.skeleton.num_layers else ()
        total["linears"] += streams * 2 * tokens * sum(n * k for name, (n, k) in shapes.items() if name not in last)
        total["attention"] += streams * 4 * tokens * length * plan.skeleton.hidden_size
        for group in sets:
            rows, width = sum(shapes[name][0] for name in group.linears), shapes[group.linears[0]][1]
            total["gram"] += tokens * width * (width + 1)
            # Of errors of inputs, or of what they do to the outputs where these are fewer.
            total["cross gram"] += (streams - 1) * 2 * tokens * width * min(width, 2 * rows)
    return total


def count(run: Callable[[], Any]) -> int:
    """Operations of products outside of what solves for codes."""
    solving = 0
    with FlopCounterMode(display=False, custom_mapping=OTHERS) as counter:
        solve = GptqStep._quantize_set

        def counted(*arguments: Any) -> None:
            nonlocal solving
            before = counter.get_total_flops()
            solve(*arguments)
            solving += counter.get_total_flops() - before

        with mock.patch.object(GptqStep, "_quantize_set", counted):
            run()
        return counter.get_total_flops() - solving


if __name__ == "__main__":
    sys.exit(main())
