"""Triton's autotuner on request: a launch takes the fastest warps and stages, and computes the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.gpu.interpreter import needs_triton

ROOT = Path(__file__).parents[3]
SCRIPT = """
import torch
from quantkit.kernels.gpu import paged_attention, w4a16
from quantkit.kernels.gpu.packing import pack
from tests.kernels.gpu.interpreted.packed import CPU, check, quantized

timed, seconds = [], {}
kernel = w4a16._tile_kernel

def bench(call, quantiles):
    call()
    timed.append(len(timed))
    return [float(len(timed) != 4)] * 3  # the fourth is the fastest

kernel._do_bench = bench
weight = quantized("int4", 128, True, (32, 2048))  # split: partials are counted in every timed launch
for rows in (1, 1, 20):
    x = torch.randn(rows, 2048)
    check(w4a16.multiply(x, pack(weight, CPU), None), x, weight.dequantize())
fastest = list(kernel.cache.values())[0].all_kwargs()
print(len(timed), len(kernel.cache), fastest, hasattr(paged_attention._attend_kernel, "cache"))
"""


@needs_triton
def test_a_shape_is_timed_once_and_keeps_the_fastest():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "QUANTKIT_AUTOTUNE": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout == "12 2 {'STAGES': 2, 'num_warps': 8, 'num_ctas': 1, 'num_stages': 2} True\n", done.stderr


@needs_triton
def test_nothing_is_timed_unless_asked():
    from triton.runtime.autotuner import Autotuner

    from quantkit.kernels.gpu import paged_attention, w4a16

    assert "QUANTKIT_AUTOTUNE" not in os.environ
    assert not any(isinstance(kernel, Autotuner) for kernel in (w4a16._tile_kernel, paged_attention._attend_kernel))
