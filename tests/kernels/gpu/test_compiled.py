"""What is committed of compiled kernels is what the engine launches: both ways, and a sample is compiled again."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.language") is None,
    reason="needs triton: pip install triton",
)

SAMPLE = """
import json, sys
sys.path.insert(0, "evals/gpu")
from compile_check import everything
from resources import Store, compile_all, default_jobs
store, sample = Store.read(), {}
same = store.triton == Store().triton
for (key, target), launch in sorted(everything([90], ["bfloat16"]).items()):
    if (key, target) in store.known:
        sample.setdefault(launch.name, (launch, target))
wrong = []
for launch, found in compile_all(list(sample.values()), default_jobs()):
    known = store.known[launch.key, 90]
    numbers = [(one.registers, one.shared, one.spills) for one in (found, known)]
    if found.problem or (same and numbers[0] != numbers[1]):
        wrong.append(f"{found} {found.problem}; known: {known}")
print(json.dumps([len(sample), wrong]))
"""
KEYS = """
import json, sys, importlib.util
sys.path.insert(0, "evals/gpu")
from recorder import source_key
found = []
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("made", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["made"] = module
    spec.loader.exec_module(module)
    found.append(source_key(module.outer_kernel))
print(json.dumps(found))
"""
KERNEL = '''
import triton, triton.language as tl
WIDTH = tl.constexpr(16)

@triton.jit
def inner(x):
    """Doubled."""
    return x + x  # twice

@triton.jit
def outer_kernel(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, inner(tl.load(at)) * WIDTH)
'''


def run(*command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
    }
    environment = {**os.environ, **variables, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment)


def test_what_is_launched_is_what_has_been_compiled(tmp_path):
    """Launches not in the file, entries that nothing launches, spills, kernels without a launch, the page."""
    done = run("evals/gpu/compile_check.py", "--check", cache=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert done.stdout == "0 differences\n"


@pytest.mark.slow
def test_a_sample_of_kernels_compiles_to_what_is_known(tmp_path):
    """One launch of each kernel for Hopper; the numbers are compared where the compiler is the same."""
    done = run("-c", SAMPLE, cache=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    count, wrong = json.loads(done.stdout.splitlines()[-1])
    assert count > 0
    assert wrong == []


def test_a_key_is_of_the_code_and_nothing_else(tmp_path):
    variants = {
        "as it is": KERNEL,
        "comments": KERNEL.replace("  # twice", "  # more\n").replace('"""Doubled."""', '"""Other words."""'),
        "moved": "\n\n# above\n" + KERNEL,
        "device function": KERNEL.replace("return x + x", "return x + x + x"),
        "constant": KERNEL.replace("(16)", "(32)"),
        "kernel": KERNEL.replace("arange(0, BLOCK)", "arange(0, 2 * BLOCK)"),
    }
    paths = []
    for number, source in enumerate(variants.values()):
        paths.append(tmp_path / f"kernel{number}.py")
        paths[-1].write_text(source)
    done = run("-c", KEYS, *map(str, paths), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    keys = dict(zip(variants, json.loads(done.stdout), strict=True))
    assert keys["as it is"] == keys["comments"] == keys["moved"]
    assert len(set(keys.values())) == 4


LOOPS = """
import json, sys
sys.path.insert(0, "evals/gpu")
from instructions import measure, products
found = products(90)
print(json.dumps([vars(measure(found[f"int4 g128, {rows} rows"], 90)) for rows in (1, 16, 64)]))
"""


@pytest.mark.slow
def test_a_weight_takes_few_instructions(tmp_path):
    """More than about 4 per weight would take longer than its bytes; numbers go from registers to the tensor cores."""
    done = run("-c", LOOPS, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for loop in json.loads(done.stdout.splitlines()[-1]):
        assert loop["per_weight"] <= 4.0
        assert loop["barriers"] <= 5
        assert loop["stores"] <= 2  # scales of a group, not numbers of the weight
        assert loop["spills"] == 0


CANDIDATES = """
import json, sys
sys.path.insert(0, "evals/gpu")
import torch
from candidates import WORK
from compile_check import record
found = record(90, [torch.bfloat16], WORK)
print(json.dumps(sorted({launch.name for launch in found})))
print(len({launch.key for launch in found}) == len(found), len(found))
"""


@pytest.mark.slow
def test_candidates_of_tune_can_be_compiled_apart(tmp_path):
    """`compile_check.py --candidates` forces each one on the launches; that they compile takes too long for a test."""
    done = run("-c", CANDIDATES, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    names, count = done.stdout.splitlines()[-2:]
    assert {"_tile_kernel", "_attend_kernel", "_prefill_kernel"} <= set(json.loads(names))
    assert count.startswith("True ")
    assert int(count.split()[1]) > 500
