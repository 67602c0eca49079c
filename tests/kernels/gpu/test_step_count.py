"""What a decode step of an 8B-shaped model launches and reads, counted on tensors without memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, sys
sys.path.insert(0, "evals/gpu")
from random_model import SHAPES
from step_count import count_step
found = {}
for count in (1, 2):
    SHAPES[f"{count} of 8B"] = {**SHAPES["8B"], "num_hidden_layers": count}
for weights in ("bf16", "w4a16"):
    count, model = count_step("8x1B", weights, "auto", 1, 1024)
    experts = [f"{name} {number}" for name, number in sorted(count.launches.items()) if name in sys.argv]
    found[f"8x1B {weights}"] = [count.bytes_read / model.stored_bytes, count.per_layer, experts]
for weights in ("bf16", "w8a8", "fp8", "w4a16 head8"):
    for kv in ("auto", "int4"):
        count, model = count_step("8B", weights, kv, 1, 1024)
        one, two = (sum(count_step(f"{n} of 8B", weights, kv, 1, 1024)[0].launches.values()) for n in (1, 2))
        found[f"{weights} {kv}"] = [count.bytes_read / model.stored_bytes, count.per_layer, 2 * one - two]
print(json.dumps(found))
"""
# Launches per layer of one step, those outside the layers shared among them: not to grow unseen.
# torch chooses the experts of the mixture: eight small launches, which a CUDA graph replays.
MOST = {"bf16": 9.3, "w8a8": 10.3, "fp8": 10.3, "w4a16 head8": 8.3, "8x1B": 17.5}
EXPERT_KERNELS = ("expert_tile_kernel",)

# Launches outside the layers, the greedy choice included: embedding, cosines, sines, norm, head, the likeliest token.
OUTSIDE = 6


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
def test_a_step_reads_the_weights_once_and_launches_no_more_than_it_did():
    """The sum over all launches of what they read is what the plan says a step reads, to 1 %."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT, *EXPERT_KERNELS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    result = json.loads(said.stdout.splitlines()[-1])
    for weights in ("bf16", "w4a16"):
        share, per_layer, experts = result.pop(f"8x1B {weights}")
        assert share == pytest.approx(1.0, abs=0.01), weights
        assert per_layer <= MOST["8x1B"], weights
        assert experts == ["expert_tile_kernel 32"], weights  # two products per layer
    for name, (share, per_layer, outside) in result.items():
        assert share == pytest.approx(1.0, abs=0.01), name
        weights, _, kv = name.rpartition(" ")
        assert per_layer <= MOST[weights] + (kv in ("int8", "int4")), name  # these keys are stored a page at a time
        assert outside == OUTSIDE, name
