"""What is committed of compiled kernels is what the engine launches: both ways, and a sample is compiled again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.language") is None,
    reason="needs triton: pip install triton",
)

WHOLE = """
import json, sys
sys.path.insert(0, "evals/gpu")
from compile_check import differences, everything, to_compile
from resources import Store, compile_all, compiled_loops, default_jobs
launches = everything()
chosen = to_compile(launches)
uncovered = []
for (key, target), launch in launches.items():
    chips = {80: (80, 86, 89), 86: (80, 86, 89), 89: (80, 86, 89)}.get(target, (target,))
    whole = target == 90 and launch.dtype == "bf16"
    traits = set().union(*(one.traits for at, one in chosen.items() if at[1] == target and one.name == launch.name))
    uncovered += [(launch.name, target)] * (whole and not any((key, chip) in chosen for chip in chips))
    uncovered += [(launch.name, target, trait) for trait in launch.traits - traits]
covered = [uncovered, [target for _, target in chosen][0], len(chosen) / len(launches)]

store, sample, wrong = Store.read(), {}, []
unlike = differences(launches, store)
same = store.triton == Store().triton
for (key, target), launch in sorted(launches.items()):
    if target == 90 and launch.dtype == "bf16" and (key, target) in store.known:
        sample.setdefault(launch.name, (launch, target))
for launch, found in compile_all(list(sample.values()), default_jobs()):
    known = store.known[launch.key, 90]
    numbers = [(one.registers, one.shared, one.spills) for one in (found, known)]
    if found.problem or (same and numbers[0] != numbers[1]):
        wrong.append(f"{found} {found.problem}; known: {known}")

def loop_of(rows):
    (launch,) = {one.key: one for (_, chip), one in launches.items()
                 if chip == 90 and one.label == f"int4 g128, {rows} rows, bf16"}.values()
    loop = [name.split(".")[0] for name in max(compiled_loops(launch, 90), key=len)]
    constants = {launch.kernel.arg_names[path[0]]: value for path, value in launch.constants.items()}
    weights = constants["BLOCK_N"] * constants["SPAN"] * (32 // constants["BITS"])
    per_weight = 32 * launch.options["num_warps"] * len(loop) / weights
    return [per_weight, loop.count("BAR"), loop.count("STS")]

print(json.dumps({
    "covered": covered,
    "differences": unlike,
    "sample": [len(sample), wrong],
    "loops": [loop_of(rows) for rows in (1, 16, 64)],
}))
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


def run(*command: str, cache: Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
    }
    environment = {**os.environ, **variables, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process says of all launches, and of some that it compiles."""
    done = run("-c", WHOLE, cache=tmp_path_factory.mktemp("cache"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_is_launched_is_what_has_been_compiled(whole):
    """Launches not in the file, entries that nothing launches, spills, kernels without a launch, the page."""
    assert whole["differences"] == []


@pytest.mark.slow
def test_every_launch_is_compiled_for_hopper_and_every_kind_of_one_for_all_chips(whole):
    uncovered, first, share = whole["covered"]
    assert uncovered == []
    assert first == 90
    assert share < 0.75


WRITE = """
import os, sys
sys.path.insert(0, "evals/gpu")
import compile_check
from resources import Resources

def compile_all(work, jobs):
    for number, (launch, target) in enumerate(work):
        if number == most:
            os._exit(9)
        yield launch, Resources(launch.name, launch.label, target, 32, 0, 0)

compile_check.compile_all, most = compile_all, int(sys.argv[1])
compile_check.WORK = (compile_check.launch_small,)  # which has the kernel; to record the others takes long
sys.argv[1:] = ["--write", "--kernel", "_norm_kernel"]
compile_check.main()
"""


@pytest.mark.slow
def test_each_compiler_has_a_table_that_can_be_taken_up_again(tmp_path):
    """A compiler without a table is said to be one; a killed run leaves what it has compiled to the next."""
    shutil.copytree(ROOT / "evals/gpu", tmp_path / "evals/gpu")
    results = tmp_path / "evals/results/compile"
    check = run("evals/gpu/compile_check.py", "--check", cache=tmp_path, folder=tmp_path)
    assert check.returncode == 1
    assert re.match(r"nothing is known of triton (\d+\.\d+)\.\S+: no .*/kernels-\1\.json", check.stderr), check.stderr
    killed = run("-c", WRITE, "50", cache=tmp_path, folder=tmp_path)
    assert killed.returncode == 9, killed.stderr[-3000:]
    (table,) = results.glob("kernels-*")
    assert sum(len(entry["chips"]) for entry in json.loads(table.read_text())["kernels"].values()) == 40
    again = run("-c", WRITE, "-1", cache=tmp_path, folder=tmp_path)
    total, known, new = map(int, re.findall(r"\d+", again.stdout.splitlines()[0]))
    assert (known, new) == (40, total - 40)
    page = (results / "resources.md").read_text()
    assert f"## triton {json.loads(table.read_text())['triton']}\n" in page


@pytest.mark.slow
def test_a_sample_of_kernels_compiles_to_what_is_known(whole):
    """One launch of each kernel for Hopper; the numbers are compared where the compiler is the same."""
    count, wrong = whole["sample"]
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


@pytest.mark.slow
def test_a_weight_takes_few_instructions(whole):
    """More than about 4 per weight would take longer than its bytes; numbers go from registers to the tensor cores."""
    for per_weight, barriers, stores in whole["loops"]:
        assert per_weight <= 4.0
        assert barriers <= 5
        assert stores <= 2  # scales of a group, not numbers of the weight
