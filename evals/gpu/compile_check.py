"""Compile every kernel that quantkit launches, for every chip generation, on a machine without a GPU.

    python evals/gpu/compile_check.py [--write] [--kernel norm] [--jobs 2]
    python evals/gpu/compile_check.py --check

What is compiled is what the Python functions launch: they run on tensors without memory, and each launch is recorded
with its types, its constants and its options. It fails on a spilled register, on more shared memory than a block can
have, on an error of the compiler, and on a kernel of the package that nothing here launches.

Each version of the compiler has a table of its own (`evals/results/compile/kernels-3.9.json`); only that of the
compiler that is installed is read and written. What it has is not compiled again unless its source, types, constants or
options have changed. `--write` keeps what is new as it comes, so that it can be killed and started again at any time;
at its end it drops what is not to be compiled any more, and writes `resources.md` beside the tables. `--check` compiles
nothing: it says what the table lacks, what it has too much, and what in it cannot be shipped.

A launch takes about a second of one core, most of it in Triton's passes and in LLVM, and nearly every one compiles to
code of its own. So not every one is compiled for every chip: `to_compile` says which.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from kernel_launches import launch_attention, launch_experts, launch_linears, launch_small
from recorder import Launch, Recorder, modules, pretended
from resources import PAGE, ROOT, SHARED_KIB, STORE, Resources, Store, compile_all, default_jobs, page
from triton.runtime.jit import JITFunction

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Types in which every launch is compiled for one chip of a generation. Chips of generation 8 need the same shared
# memory for a launch, and registers that differ by a few.
WHOLE = {8: (), 9: ("bf16",), 10: ()}
Launches = dict[tuple[str, int], Launch]
UNLAUNCHED = "in the package, but nothing here launches it"
WORK = (launch_linears, launch_experts, launch_attention, launch_small)


def record(chip: int) -> list[Launch]:
    """Every launch that the engine can make on a chip."""
    recorder = Recorder()
    with pretended(recorder.record, chip):
        for dtype in DTYPES:
            recorder.suffix = f", {dtype}"
            for work in WORK:
                work(recorder, DTYPES[dtype])
    return list(recorder.launches.values())


def unlaunched(launches: Iterable[Launch]) -> set[str]:
    """Kernels of the package that nothing launched; device functions that kernels call do not count."""
    named = {name: value for module in modules() for name, value in vars(module).items()}
    there = {name for name, value in named.items() if isinstance(value, JITFunction) and name.endswith("_kernel")}
    return there - {launch.kernel.__name__ for launch in launches}


def everything() -> Launches:
    """All launches by key and chip."""
    return {(launch.key, target): launch for target in SHARED_KIB for launch in record(target)}


def to_compile(launches: Launches) -> Launches:
    """Those of all launches that are compiled, most important first.

    For Hopper each one in bfloat16; and for every chip each type, constant or option that its kernel has not had there.
    """
    chosen: Launches = {}
    had: set[tuple[str, int]] = set()
    for chip in sorted({target for _, target in launches}, key=(90, 80, 86, 89, 100).index):
        traits: set[tuple[Any, ...]] = set()
        for (key, target), launch in launches.items():
            if target != chip:
                continue
            is_new = launch.dtype in WHOLE[chip // 10] and (key, chip // 10) not in had
            if is_new or not launch.traits <= traits:
                chosen[key, chip] = launch
                had.add((key, chip // 10))
                traits |= launch.traits
    return chosen


def _compile(work: Sequence[tuple[Launch, int]], store: Store, arguments: argparse.Namespace) -> list[Resources]:
    """Compile some launches; what has no problem is kept, every now and then also on disk."""
    compiled: list[Resources] = []
    for launch, item in compile_all(work, arguments.jobs):
        compiled.append(item)
        if not item.problem:
            store.known[launch.key, item.target] = item
        if item.problem:
            print(item, item.problem, flush=True)
        if arguments.write and len(compiled) % 20 == 0:
            store.write()
            print(f"{len(compiled)} of {len(work)}", flush=True)
    return compiled


def problems(launches: Launches, store: Store) -> list[str]:
    """Launches that cannot be shipped, one line each.

    What was not compiled for a chip itself needs as much as on another chip of its generation.
    """
    generation = {(key, target // 10): item for (key, target), item in store.known.items()}
    needs = [
        replace(store.known.get(at) or generation[at[0], at[1] // 10], target=at[1])
        for at in launches
        if (at[0], at[1] // 10) in generation
    ]
    return [f"{item.kernel} for sm_{item.target}, {item.label}: {item.problem}" for item in needs if item.problem]


def differences(launches: Launches, store: Store) -> list[str]:
    """What is wrong with what is known of all launches, one line each; empty if nothing is."""
    chosen = to_compile(launches)
    new = {at: launch for at, launch in chosen.items() if at not in store.known}
    stale = [item for at, item in store.known.items() if at not in chosen]
    said = [f"{launch.name} for sm_{at[1]}, {launch.label}: not compiled" for at, launch in new.items()]
    said += [f"{item.kernel} for sm_{item.target}, {item.label}: not to be compiled any more" for item in stale]
    said += problems(launches, store)
    said += [f"{name}: {UNLAUNCHED}" for name in unlaunched(launches.values())]
    if not PAGE.exists() or PAGE.read_text() != page():
        said.append(f"{PAGE.relative_to(ROOT)}: not what the tables beside it give")
    return said


def _check() -> None:
    if not STORE.exists():
        tables = ", ".join(path.name for path in sorted(STORE.parent.glob("kernels-*.json"))) or "none"
        sys.exit(f"nothing is known of triton {triton.__version__}: no {STORE.relative_to(ROOT)} (there is: {tables})")
    said = differences(everything(), Store.read())
    for line in said[:40]:
        print(line)
    print(f"{len(said)} differences" + ("; python evals/gpu/compile_check.py --write" if said else ""))
    sys.exit(bool(said))


def main() -> None:
    """Compile what is not known, print what is wrong, write file and page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"keep what is found in {STORE.name} and {PAGE.name}")
    parser.add_argument("--kernel", default="", help="only kernels whose name has this in it")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--check", action="store_true", help="compare what is launched with what is known")
    arguments = parser.parse_args()
    if arguments.check:
        _check()
    launches = everything()
    chosen = to_compile(launches)
    store = replace(Store.read(), triton=triton.__version__)
    asked = [(at, launch) for at, launch in chosen.items() if arguments.kernel in launch.name]
    new = [(launch, at[1]) for at, launch in asked if at not in store.known]
    print(f"{len(asked)} to be known, {len(asked) - len(new)} are, {len(new)} to compile", flush=True)
    wrong = [item for item in _compile(new, store, arguments) if item.problem]
    missing = sorted(unlaunched(launches.values()))
    for line in (*problems(launches, store), *(f"{name}: {UNLAUNCHED}" for name in missing)):
        print(line)
    if arguments.write:
        store.known = {at: item for at, item in store.known.items() if at in chosen}
        store.write()
        PAGE.write_text(page())
        print(f"{len(store.known)} of {len(chosen)} known to triton {store.triton}")
    print(f"{len(new)} compiled, {len(wrong)} with a problem, {len(missing)} kernels unchecked")
    sys.exit(bool(wrong or missing))


if __name__ == "__main__":
    main()
