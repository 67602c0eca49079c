"""Parts of the GPU run, each by itself: what becomes of what they were at, and what they bring along."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.gpu.interpreter import needs_triton

GPU = Path(__file__).resolve().parents[2] / "evals/gpu"


@pytest.fixture
def evals(monkeypatch):
    """Imports a program of evals/gpu."""
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module


def test_families_that_fail_are_rows(evals, tmp_path, monkeypatch):
    smoke = evals("smoke")
    check = smoke.kernel_check
    known = {"ops": check.Verdict(True, "right"), "attention": check.Verdict(False, "SIGSEGV")}
    monkeypatch.setattr(check, "read_verdicts", lambda device: known)
    assert smoke.verdict(torch.device("cpu"), "ops") == {"verdict": "right"}
    with pytest.raises(AssertionError, match="SIGSEGV"):
        smoke.verdict(torch.device("cpu"), "attention")


def test_a_kernel_that_triton_refuses_is_an_error(evals, monkeypatch):
    """Elsewhere torch does its work; here its time would stand for the kernel's."""
    timing = evals("timing")
    monkeypatch.setattr(sys, "argv", ["part.py", "--device", "cpu"])
    monkeypatch.setattr(timing, "rehearse", lambda: None)
    monkeypatch.setattr(timing.kernels, "refusals", lambda: (KeyError,))
    timing.parse()
    with timing._measuring, pytest.raises(KeyError):
        timing.kernels.attempt("ops", torch.device("cpu"), {}.__getitem__, "x")
    assert timing.kernels.why_replaced("ops", torch.device("cpu")) is None


def test_a_measurement_is_a_median_with_its_spread(evals, monkeypatch):
    """On the host's clock, after a first call that is only checked; graphs need a GPU."""
    timing, clock, steps = evals("timing"), [0.0], iter([5.0, 1e-6, 9e-6, 2e-6])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += next(steps)

    times = timing.measure([call], "cpu")
    assert times["us"] == pytest.approx(2.0)
    assert (times["p10"], times["p90"], times["how"]) == (pytest.approx(1.0), pytest.approx(9.0), "host")


def test_the_time_of_a_result_that_is_not_finite_is_no_figure(evals):
    timing = evals("timing")
    with pytest.raises(ArithmeticError, match="not finite"):
        timing.measure([lambda: torch.tensor([1.0, torch.nan])], "cpu")
    assert timing.measure([lambda: torch.ones(2), lambda: None], "cpu")["how"] == "host"


def test_a_step_whose_logits_are_not_finite_is_no_figure(evals):
    model = SimpleNamespace(forward=lambda batch, cache: torch.full((1, 4), torch.inf))
    with pytest.raises(ArithmeticError, match="not finite"):
        evals("end_to_end").step_times(model, None, None, "cpu")


@pytest.mark.slow
def test_the_tests_of_the_sanitizer_exist(evals):
    tests = evals("sanitizer").TESTS
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", *tests]
    done = subprocess.run(command, cwd=GPU.parents[1], capture_output=True, text=True, check=False)
    assert done.stdout.count("test_on_gpu.py::") == len(tests), done.stdout


def test_rows_of_several_threads_are_written_one_after_another(evals, tmp_path, monkeypatch):
    results, turn = evals("results"), Lock()

    def write(path, data):
        assert turn.acquire(blocking=False), "two write the same file"
        time.sleep(0.001)
        turn.release()

    monkeypatch.setenv("RESULTS", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *values: None)
    monkeypatch.setattr(results, "_write", write)
    rows = results.Results("smoke", {}, 60)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: rows.add(case=number), range(32)))


def test_compiled_kernels_travel(evals, tmp_path, monkeypatch):
    """Newest first, in as many files of a size as may come back; each as a whole, or Triton compiles it again."""
    results = evals("results")
    cache, other = tmp_path / "cache", tmp_path / "other"
    for name in ("OUT", "RESULTS"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(results, "_CACHE_FILE_BYTES", 500_000)
    for number in range(8):
        (cache / f"key{number}").mkdir(parents=True)
        for suffix in ("cubin", "json"):
            path = cache / f"key{number}/kernel.{suffix}"
            path.write_bytes(os.urandom(300_000) if suffix == "cubin" else b"{}")
        os.utime(path.parent, (number, number))
    results.pack()
    names = sorted(path.name for path in (tmp_path / "OUT").iterdir())
    assert names == ["kernels-0.tar.gz", "kernels-1.tar.gz", "results.tar.gz"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(other))
    results.unpack(tmp_path / "OUT")
    kept = {str(path.relative_to(other)) for path in other.rglob("*.*")}
    assert kept == {f"key{number}/kernel.{suffix}" for number in range(4, 8) for suffix in ("cubin", "json")}


def test_kernels_from_another_build_of_triton_get_the_names_and_paths_of_this_one(evals, tmp_path, monkeypatch):
    results = evals("results")
    monkeypatch.setattr(results, "_triton", lambda: ("3.6.0", "here"))
    for name, version in (("A", "3.6.0"), ("B", "3.5.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key.json").write_text(json.dumps({"triton": version, "key": "-of the kernel"}))
        (tmp_path / name / "k.cubin").touch()
        group = {"child_paths": {file: f"/elsewhere/{name}/{file}" for file in ("k.cubin", "k.source")}}
        (tmp_path / name / "__grp__k.json").write_text(json.dumps(group))
    results.adopt([tmp_path / "A", tmp_path / "B"])
    named = base64.b32encode(hashlib.sha256(b"here-of the kernel").digest()).decode().rstrip("=")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([named, "B"])
    for name in (named, "B"):
        group = json.loads((tmp_path / name / "__grp__k.json").read_text())
        assert group == {"child_paths": {"k.cubin": str(tmp_path / name / "k.cubin")}}


AHEAD = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import compile_ahead, results
from pathlib import Path
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver

driver.set_active(compile_ahead.Chip(90))
launches = list(compile_ahead.record(90))
(number,) = [i for i, one in enumerate(launches) if one.name == "_gate_kernel"][:1]
assert compile_ahead._compile(number) == ""
cache = Path(os.environ["TRITON_CACHE_DIR"])
results.pack_kernels(cache, [cache.parent / "kernels-ahead.tar.gz"])
os.environ["TRITON_CACHE_DIR"] = str(cache.parent / "other")
results.unpack(cache.parent)
CUDABackend.make_ttir = CUDABackend.make_cubin = None
kernel, given = compile_ahead._launches[number]
kernel.device_caches.clear()
compile_ahead._run(kernel, grid=(1,), warmup=True, **given)
print(len(launches))
"""


@needs_triton
@pytest.mark.slow
def test_what_a_call_launches_is_compiled_ahead(tmp_path):
    """One kernel is compiled, travels to another folder, and is found there by the same launch."""
    places = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "RESULTS": str(tmp_path / "results/one")}
    environment = {**os.environ, **places, "PYTHONPATH": str(GPU.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", AHEAD, str(GPU)]
    environment |= {"TRITON_INTERPRET": "0", "TRITON_STORE_BINARY_ONLY": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1]) > 250


def test_predictions_are_of_rows_that_a_call_measures(evals):
    """Whose labels the parts know; those of the others are words that they have in their code."""
    end_to_end, linears, attention = evals("end_to_end"), evals("linears"), evals("attention")
    steps = {(weights, *case) for weights, cases in end_to_end.PLAN for case in cases}
    products = {
        ("8192 squared", *linears.SHAPES["8192 squared"], m, kind) for kind in linears.KINDS for m in linears.ROWS
    }
    case = attention.CASE.batch, attention.CASE.context
    kinds = {(*case, kind) for kind in (*attention.KV_TYPES, attention.SDPA)}
    rows = json.loads((GPU / "predictions.json").read_text())["rows"]
    for name, measured in {"end_to_end": steps, "linears": products, "attention": kinds}.items():
        assert {tuple(row["labels"].values()) for row in rows if row["file"] == name} == measured


def test_a_prediction_becomes_part_of_its_row(evals, tmp_path, monkeypatch):
    results = evals("results")
    monkeypatch.setenv("RESULTS", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *values: None)
    rows = results.Results("quantization", {}, 60)
    rows.attempt(lambda: {"layer_seconds": 9.0}, kind="gptq-int4 g128")
    (row,) = rows.rows
    assert row.keys() == {"kind", "predicted_layer_seconds", "predicted_model_minutes", "layer_seconds"}
    rows.attempt(lambda: {"us": 1.0}, kind="something else")
    assert rows.rows[1] == {"kind": "something else", "us": 1.0}
    rehearsal = results.Results("peer", {"rehearsal": True}, 60)
    labels = {"kind": "transformers generate", "weights": "bf16", "batch": 1, "context": 1024}
    assert rehearsal.attempt(lambda: {"step_ms": 1.0}, **labels) == {**labels, "step_ms": 1.0}


COMPILE = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

@triton.jit
def double_kernel(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) * 2)

if "known" in sys.argv:
    CUDABackend.make_ttir = CUDABackend.make_cubin = None
source = ASTSource(fn=double_kernel, signature={"x": "*fp32", "BLOCK": "constexpr"}, constexprs={(1,): 128})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@needs_triton
@pytest.mark.slow
def test_a_kernel_that_travelled_is_not_compiled_again(tmp_path):
    (tmp_path / "compile.py").write_text(COMPILE)
    places = {"TRITON_CACHE_DIR": tmp_path / "cache", "RESULTS": tmp_path / "results", "OUT": tmp_path / "out"}
    environment = {**os.environ, **{name: str(path) for name, path in places.items()}, "TRITON_INTERPRET": "0"}
    for path in (tmp_path / "results", tmp_path / "out"):
        path.mkdir()

    def python(*words):
        return subprocess.run([sys.executable, *map(str, words)], env=environment, check=False, cwd=tmp_path).returncode

    assert python("compile.py") == 0
    assert python(GPU / "results.py", "pack") == 0
    shutil.rmtree(tmp_path / "cache")
    assert python("compile.py", "known") != 0
    assert python(GPU / "results.py", "unpack", "out") == 0
    assert python("compile.py", "known") == 0


def test_a_machine_without_git_has_a_commit_all_the_same(evals, monkeypatch):
    timing = evals("timing")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("QUANTKIT_COMMIT", "0123abc")
    assert timing.describe("cpu")["commit"] == "0123abc"


def test_folders_that_name_no_device_are_of_no_gpu(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(GPU.parent))
    page = importlib.import_module("pages").generator("gpu/page.py")
    for name, kept in {"scale": {"one": []}, "gpu": {"meta": {"device": "Test GPU"}}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "smoke.json").write_text(json.dumps(kept))
    assert page.gpu_folders(tmp_path) == [tmp_path / "gpu"]
