"""What compiled kernels need: compile a recorded launch, keep what the assembler says as JSON, print it as a page.

There is one JSON per minor version of the compiler. It has one entry per key (see `recorder`), with registers of a
thread, bytes of shared memory of a block and stores of spilled registers for each chip. Nothing here runs a kernel.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import triton
from recorder import Launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "evals/results/compile"
STORE = FOLDER / f"kernels-{'.'.join(triton.__version__.split('.')[:2])}.json"
PAGE = FOLDER / "resources.md"
# Shared memory that one block may ask for, KiB: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
# The assembler puts a few registers aside, outside of loops, to fit one more block on a processor; more than that is a
# kernel too large.
MOST_SPILLS = 12
_WORK: list[tuple[Launch, int]] = []


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs on one chip."""

    kernel: str
    label: str
    target: int
    registers: int
    shared: int
    spills: int
    error: str = ""

    @property
    def problem(self) -> str:
        """Why this cannot be shipped; empty if it can."""
        if self.error:
            return self.error
        if self.spills > MOST_SPILLS:
            return f"{self.spills} stores of spilled registers"
        limit = SHARED_KIB[self.target] * 1024
        return f"{self.shared} bytes of shared memory, {limit} at most" if self.shared > limit else ""


@dataclass
class Store:
    """What one compiler has made of kernels.

    Args:
        triton: its version.
        known: by key and chip.
    """

    triton: str = triton.__version__
    known: dict[tuple[str, int], Resources] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = STORE) -> Store:
        """What a file holds; nothing where there is none."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text())
        known = {
            (key, int(chip)): Resources(entry["kernel"], entry["label"], int(chip), *numbers)
            for key, entry in data["kernels"].items()
            for chip, numbers in entry["chips"].items()
        }
        return cls(data["triton"], known)

    def write(self, path: Path = STORE) -> None:
        """One line per entry, sorted, so that changes show."""
        entries: dict[str, dict[str, object]] = {}
        for (key, chip), item in sorted(self.known.items(), key=lambda pair: (pair[1].kernel, pair[1].label, pair[0])):
            entry = entries.setdefault(key, {"kernel": item.kernel, "label": item.label, "chips": {}})
            entry["chips"][str(chip)] = [item.registers, item.shared, item.spills]  # type: ignore[index]
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(
            f'{{\n "made_by": "python evals/gpu/compile_check.py --write",\n "triton": "{self.triton}",\n'
            f' "numbers": "registers of a thread, bytes of shared memory of a block, stores of spilled registers",\n'
            f' "kernels": {{\n{lines}\n }}\n}}\n'
        )
        partial.replace(path)  # whole at any moment, so that a run can be killed and the next goes on


def _compiled(launch: Launch, target: int) -> triton.compiler.CompiledKernel:
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)


def compile_one(launch: Launch, target: int) -> Resources:
    """Compile for a chip and read what the assembler says."""
    try:
        done = _compiled(launch, target)
    except Exception as error:  # compilers raise whatever they like
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return Resources(launch.name, launch.label, target, 0, 0, 0, f"{type(error).__name__}: {lines[-1][:160]}")
    said = _disassembled(done.asm["cubin"], "-res-usage")
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    # A stack may be there for other reasons; a spill is a store to it.
    stores = _disassembled(done.asm["cubin"], "-sass") if numbers.get("STACK") else ""
    spills = len(re.findall(r"\bSTL\b", stores))
    return Resources(launch.name, launch.label, target, numbers.get("REG", 0), done.metadata.shared, spills)


def compiled_loops(launch: Launch, target: int) -> list[list[str]]:
    """Names of the instructions of each loop of a kernel compiled for a chip, in the order in which loops end."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _disassembled(_compiled(launch, target).asm["cubin"], "-sass"))
    named = [(int(at, 16), re.sub(r"^@!?U?P\w+\s+", "", text).split()[0], text) for at, text in lines]
    bodies = []
    for at, _, text in named:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            # NOPs fill the memory after the last instruction.
            bodies.append([name for where, name, _ in named if int(jump[1], 16) <= where <= at and name != "NOP"])
    return bodies


def compile_all(work: Sequence[tuple[Launch, int]], jobs: int) -> Iterator[tuple[Launch, Resources]]:
    """Compile for chips, in several processes; in no order."""
    _WORK[:] = work
    # Forked, so that what has been recorded is there.
    with multiprocessing.get_context("fork").Pool(jobs, _end_with_parent) as pool:
        for index, item in pool.imap_unordered(_compile_number, range(len(work))):
            yield work[index][0], item


def _end_with_parent() -> None:
    """A process of the pool does not stay behind where the one that began it is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


def _compile_number(index: int) -> tuple[int, Resources]:
    return index, compile_one(*_WORK[index])


def _disassembled(cubin: bytes, what: str) -> str:
    """Output of the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def page() -> str:
    """For each compiler, kernel and chip the most that any compiled variant needs."""
    lines = [
        "# What the GPU kernels need",
        "",
        "Made by `python evals/gpu/compile_check.py --write` out of the `kernels-*.json` beside it, which have each",
        "variant; compiled with Triton's own compiler and assembler, nothing was run. Per kernel and chip: variants",
        "compiled, most registers of a thread, most shared memory of a block, most stores of spilled registers.",
        "sm_90 has every launch that the engine makes in bfloat16; besides, every chip has each type, constant and",
        "option of each kernel at least once.",
        "A test holds files and page to the kernels: a changed kernel has to be compiled anew.",
    ]
    for store in map(Store.read, sorted(FOLDER.glob("kernels-*.json"))):
        lines += ["", f"## triton {store.triton}", "", *_table(list(store.known.values()))]
    return "\n".join(lines) + "\n"


def _table(items: list[Resources]) -> list[str]:
    lines = ["| kernel | " + " | ".join(f"sm_{target}" for target in SHARED_KIB) + " |"]
    lines.append("|---|" + "---|" * len(SHARED_KIB))
    for name in sorted({item.kernel for item in items}):
        cells = []
        for target in SHARED_KIB:
            rows = [item for item in items if item.kernel == name and item.target == target]
            most, shared, spills = (
                max((getattr(row, key) for row in rows), default=0) for key in ("registers", "shared", "spills")
            )
            text = f"{len(rows)}: {most} regs, {shared / 1024:.1f} KiB" + (f", {spills} spilled" if spills else "")
            cells.append(text if rows else "-")
        lines.append(f"| `{name.strip('_')}` | " + " | ".join(cells) + " |")
    return lines


def default_jobs() -> int:
    """Processes that compile at once."""
    return max(1, min(16, len(os.sched_getaffinity(0))))
