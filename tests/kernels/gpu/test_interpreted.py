"""The Triton kernels without a GPU: what they compute. That they compile for one: `test_compiled`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.gpu.interpreter import needs_triton, why_not

ROOT = Path(__file__).parents[3]


def run(*command: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_kernels_are_interpreted_by_the_tests_in_the_folder():
    if why_not():
        pytest.skip(why_not())
    assert len(list((Path(__file__).parent / "interpreted").glob("test_*.py"))) == 8


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="without a GPU this process interprets them itself")
@needs_triton
def test_kernels_are_interpreted_beside_a_gpu():
    folder = "tests/kernels/gpu/interpreted"
    said = run("-m", "pytest", "-p", "no:cacheprovider", folder, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert "passed" in said
    assert "skipped" not in said


@pytest.mark.slow
@needs_triton
def test_steps_wait_for_nothing_and_graphs_compile_nothing_of_their_own():
    files = [f"tests/kernels/gpu/{name}.py" for name in ("no_sync", "graph_launches")]
    said = run("-m", "pytest", "-p", "no:cacheprovider", *files, TRITON_INTERPRET="0")
    assert "passed" in said
    assert "skipped" not in said


def test_without_a_gpu_nothing_of_triton_is_used(monkeypatch):
    from quantkit.kernels import gpu

    assert not gpu.is_used(torch.device("cpu"))
    monkeypatch.setenv("QUANTKIT_TRITON", "0")
    assert not gpu.is_used(torch.device("cuda"))
