"""The Triton kernels without a GPU: what they compute. That they compile for one: `test_compiled`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.language") is None,
    reason="needs triton: pip install triton",
)


def run(*command: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def too_old() -> bool:
    """Whether this Triton's interpreter fails with this NumPy: it makes a number of an array of one."""
    triton, numpy = (tuple(int(part) for part in version(name).split(".")[:2]) for name in ("triton", "numpy"))
    return triton < (3, 9) and numpy >= (2, 4)


@needs_triton
def test_kernels_compute_what_the_reference_does():
    if too_old():
        pytest.skip("Triton before 3.9 with NumPy from 2.4 on cannot interpret loops")
    files = (
        "tests/kernels/gpu/interpreted.py",
        "tests/kernels/gpu/interpreted_attention.py",
        "tests/kernels/gpu/interpreted_rounded.py",
        "tests/kernels/gpu/interpreted_experts.py",
        "tests/kernels/gpu/interpreted_graphs.py",
        "tests/kernels/gpu/interpreted_head.py",
        "tests/kernels/gpu/interpreted_sampling.py",
    )
    said = run(*("-m", "pytest", "-p", "no:cacheprovider", *files), TRITON_INTERPRET="1")
    assert "passed" in said
    assert "skipped" not in said


@needs_triton
def test_steps_wait_for_nothing():
    said = run("-m", "pytest", "-p", "no:cacheprovider", "tests/kernels/gpu/no_sync.py", TRITON_INTERPRET="0")
    assert "passed" in said
    assert "skipped" not in said


def test_without_a_gpu_nothing_of_triton_is_used(monkeypatch):
    from quantkit.kernels import gpu

    assert not gpu.is_used(torch.device("cpu"))
    monkeypatch.setenv("QUANTKIT_TRITON", "0")
    assert not gpu.is_used(torch.device("cuda"))
