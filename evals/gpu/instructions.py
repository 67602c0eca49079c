"""Machine instructions that a product with packed weights takes per weight, counted in compiled code; nothing is run.

    python evals/gpu/instructions.py [--write] [--targets 80 90]

A product with INT4 weights of few rows is bound by memory only where the instructions of its main loop take less time
than its bytes. Those of the longest loop are counted, which is the one over blocks of the weight, and divided by the
weights that one thread sees in it. `--write` keeps them in `evals/results/compile/instructions.json` under the
version of the compiler, next to what other versions said, and writes the page beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import triton
from compile_check import everything
from recorder import Launch
from resources import ROOT, SHARED_KIB, disassembled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

STORE = ROOT / "evals/results/compile/instructions.json"
PAGE = STORE.with_suffix(".md")
KERNEL = "_tile_kernel"
WEIGHTS = ("int4 g128", "int4 g128 asym", "int4 g64", "int4 channel", "int8 channel", "fp8 channel", "nvfp4", "mxfp4")


@dataclass(frozen=True)
class Loop:
    """The main loop of one kernel.

    Args:
        per_weight: instructions of all threads by weights of a block.
        barriers: at which threads wait for each other.
        stores: of registers to shared memory, where decoded numbers would go on a detour.
        registers: of a thread.
        spills: stores of registers for which there was no room.
    """

    per_weight: float
    barriers: int
    stores: int
    registers: int
    spills: int


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        code: of the machine, disassembled.
        registers: of a thread.
        shared: bytes of a block.
    """

    code: str
    registers: int
    shared: int

    @cached_property
    def names(self) -> list[tuple[int, str, str]]:
        """Address, name and text of each instruction; not of what fills the memory after the last."""
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", self.code)
        named = [(int(at, 16), re.sub(r"^@!?U?P\w+\s+", "", text).split()[0], text) for at, text in lines]
        return [line for line in named if line[1] != "NOP"]

    @property
    def loops(self) -> list[list[str]]:
        """Names of the instructions of each loop, in the order in which loops end."""
        bodies = []
        for at, _, text in self.names:
            jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
            if jump and int(jump[1], 16) < at:
                bodies.append([name for where, name, _ in self.names if int(jump[1], 16) <= where <= at])
        return bodies


def compiled(launch: Launch, target: int) -> Compiled:
    """A launch compiled for a chip."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    done = triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        code, usage = disassembled("-sass", file.name), disassembled("-res-usage", file.name)
    return Compiled(code, int(re.search(r"REG:(\d+)", usage)[1]), done.metadata.shared)  # type: ignore[index]


def measure(launch: Launch, target: int) -> Loop:
    """Compile a product for a chip and count in its longest loop, the one over blocks of the weight."""
    done = compiled(launch, target)
    names = Counter(name.split(".")[0] for name in max(done.loops, key=len))
    constants: dict[str, Any] = {launch.kernel.arg_names[path[0]]: value for path, value in launch.constants.items()}
    weights = constants["BLOCK_N"] * constants["SPAN"] * (32 // constants["BITS"])
    threads = 32 * launch.options["num_warps"]
    return Loop(
        per_weight=round(names.total() * threads / weights, 2),
        barriers=names["BAR"],
        stores=names["STS"],
        registers=done.registers,
        spills=len(re.findall(r"\bSTL\b", done.code)),
    )


def products(target: int) -> dict[str, Launch]:
    """Launches of products with packed weights, by what is multiplied."""
    labels = {launch.label.removesuffix(", bf16"): launch for launch in everything([target], ["bf16"]).values()
              if launch.name == KERNEL}  # fmt: skip
    return {label: launch for label, launch in labels.items() if label.rsplit(", ", 1)[0] in WEIGHTS}


def page(data: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The counts as a table for each compiler."""
    lines = [
        "# Instructions per weight",
        "",
        "Made by `python evals/gpu/instructions.py --write`: machine instructions per weight in the main loop of",
        "products with packed weights, counted in compiled code; in brackets barriers and stores to shared memory",
        "per block. Nothing was run. At 4 instructions per weight and full issue an H100 takes about as long for a",
        "weight of 4 bits as its memory does at 3 TB/s.",
    ]
    for version, chips in sorted(data.items()):
        head = " | ".join(["weight, rows", *(f"sm_{chip}" for chip in chips)])
        lines += ["", f"## triton {version}", "", f"| {head} |", "|---|" + "---|" * len(chips)]
        for label in next(iter(chips.values())):
            cells = [chips[chip][label] for chip in chips]
            texts = [f"{cell['per_weight']:.1f} ({cell['barriers']}, {cell['stores']})" for cell in cells]
            lines.append(f"| {label} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Count, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"keep what is counted in {STORE.name} and {PAGE.name}")
    parser.add_argument("--targets", type=int, nargs="+", default=list(SHARED_KIB))
    arguments = parser.parse_args()
    counted: dict[str, dict[str, Any]] = {}
    for target in arguments.targets:
        counted[str(target)] = {}
        for label, launch in products(target).items():
            counted[str(target)][label] = asdict(measure(launch, target))
            print(f"sm_{target} {label}: {counted[str(target)][label]}", flush=True)
    if arguments.write:
        data = json.loads(STORE.read_text()) if STORE.exists() else {}
        data[triton.__version__] = data.get(triton.__version__, {}) | counted
        STORE.write_text(json.dumps(data, indent=1) + "\n")
        PAGE.write_text(page(data))


if __name__ == "__main__":
    main()
