"""Compile every kernel that quantkit launches, for every chip generation, on a machine without a GPU.

    python evals/gpu/compile_check.py [--write docs/kernels-resources.md] [--targets 80 90]

What is compiled is what the Python functions launch: they run on tensors without memory, and each launch is recorded
with its types, its constants and its options. It fails on a spilled register, on more shared memory than a block can
have, on an error of the compiler, and on a kernel of the package that nothing here launches.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import quantkit.kernels.triton as kernels
from quantkit.kernels.attention import AttentionOptions
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.layouts import kv_scheme, make_layout
from quantkit.kernels.triton.layout import PackedWeight

# Shared memory that one block may ask for, KiB: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
# The assembler puts a few registers aside to fit one more block on a processor; more than that is a kernel too large.
MOST_SPILLS = 8
PROCESSORS = 132
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass
class Launch:
    """One recorded launch."""

    kernel: JITFunction[Any]
    label: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, int]

    @property
    def key(self) -> str:
        """The same for launches that compile to the same code."""
        return repr((self.kernel.__name__, self.signature, self.constants, self.attributes, self.options))


@dataclass
class Recorder:
    """Stands in for the launcher of every kernel."""

    label: str = ""
    launches: dict[str, Launch] = field(default_factory=dict)

    def record(self, kernel: JITFunction[Any], *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        """Keep a launch instead of making it."""
        given = dict(zip(kernel.arg_names, values, strict=False))
        options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
        given |= named
        launch = Launch(kernel, self.label, {}, {}, {}, options)
        for index, name in enumerate(kernel.arg_names):
            constant = kernel.params[index].is_constexpr
            launch.signature[name] = _sign(given[name], (index,), constant, launch)
        self.launches.setdefault(launch.key, launch)


def _sign(value: Any, path: tuple[int, ...], constant: bool, launch: Launch) -> Any:
    """The type of an argument as the compiler wants it; what Triton would specialize on is noted in the launch."""
    if isinstance(value, tuple):
        return tuple(_sign(item, (*path, index), constant, launch) for index, item in enumerate(value))
    if constant or value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
        launch.constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    aligned = True if isinstance(value, torch.Tensor) else value % 16 == 0
    if aligned:
        launch.attributes[path] = [["tt.divisibility", 16]]
    return f"*{_TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_linears(recorder: Recorder, dtype: torch.dtype) -> None:
    """Packed linears: bits, groups, zeros, rows; and what INT8 and FP8 inputs need."""
    from quantkit.kernels.triton import w4a16, w8a8

    rows, width, span = 8192, 4096, 64
    for bits, group, zeros, natural in (
        *[(4, 128, False, False), (4, 128, True, False), (4, 64, False, False), (4, 0, False, False)],
        *[(8, 0, False, False), (8, 128, False, False), (2, 64, True, False), (8, 0, False, True)],
    ):
        groups = 1 if group == 0 else width // group
        weight = PackedWeight(
            words=meta(rows, width * bits // 32, dtype=torch.int32),
            scale=meta(groups, rows, dtype=dtype),
            zero=meta(groups, rows, dtype=torch.uint8) if zeros else None,
            shape=(rows, width),
            bits=bits,
            span=span,
            group=group,
            natural=natural,
        )
        for count in {4: (1, 4, 16, 32, 64), 8: (1, 16, 64), 2: (1, 4)}[bits]:
            recorder.label = f"int{bits} g{group or 'channel'}{' asym' if zeros else ''}, {count} rows"
            row_scale = meta(count, dtype=torch.float32) if natural else None
            w4a16.multiply(meta(count, width, dtype=dtype), weight, None, row_scale)
        if not natural:
            recorder.label = f"int{bits} g{group or 'channel'}{' asym' if zeros else ''}, decoded"
            w4a16.decode(weight, dtype)
    for name in ("int8", "fp8"):
        recorder.label = f"inputs to {name}"
        w8a8.quantize_rows(meta(64, width, dtype=dtype), name)
    recorder.label = "int8 sums to outputs"
    w8a8.scale_sums(meta(64, rows, dtype=torch.int32), meta(64, 1, dtype=torch.float32), meta(rows), None, dtype)


def _batch(count: int) -> ForwardBatch:
    long = {"dtype": torch.int64}
    return ForwardBatch(
        token_ids=meta(count, **long),
        positions=meta(count, **long),
        query_starts=meta(count + 1, dtype=torch.int32),
        page_table=meta(count, 128, dtype=torch.int32),
        slots=meta(count, **long),
        tail_rows=meta(count, **long),
        logit_rows=meta(count, **long),
        query_lengths=(1,) * count,
        context_lengths=(8192,) * count,
        sequence_ids=tuple(range(count)),
    )


def launch_attention(recorder: Recorder, dtype: torch.dtype) -> None:
    """Paged decode and the store: KV types, head widths, options."""
    from quantkit.kernels.triton import kv_store, paged_decode, paged_prefill

    plain = AttentionOptions(scale=0.1)
    every = AttentionOptions(scale=0.1, window=512, softcap=30.0, sinks=meta(32, dtype=torch.float32))
    for kind in ("auto", "fp8", "int8", "int4"):
        for dim in (64, 80, 128, 256):
            layout = make_layout(num_heads=8, head_dim=dim, page_size=64, dtype=dtype, scheme=kv_scheme(kind))
            tail = meta(32, 8, layout.tail_tokens, dim, dtype=dtype) if layout.has_tail else None
            views = layout.views(meta(4096, layout.page_bytes, dtype=torch.uint8), tail)
            query, key, value = (meta(32, heads, dim, dtype=dtype) for heads in (32, 8, 8))
            for options in (plain, every) if dim == 128 else (plain,):
                for count in (1, 32) if dim == 128 else (32,):
                    recorder.label = f"{kind} KV, {dim} channels, batch {count}"
                    recorder.label += ", window, softcap, sinks" if options is every else ""
                    out = meta(count, 32, dim, dtype=dtype)
                    paged_decode.attend(query[:count], key[:count], value[:count], views, _batch(count), options, out)
                out = meta(32, 32, dim, dtype=dtype)
                chunks = replace(_batch(32), query_lengths=(512,) * 32)
                recorder.label = f"{kind} KV, {dim} channels, chunks"
                recorder.label += ", window, softcap, sinks" if options is every else ""
                paged_prefill.attend(query, key, value, views, chunks, options, out)
            recorder.label = f"{kind} KV, {dim} channels"
            kv_store.store(key, value, views, _batch(32))
            if tail is not None:
                kv_store.store_tail(key, views, _batch(32))


def launch_small(recorder: Recorder, dtype: torch.dtype) -> None:
    """Norms, rotation, gates."""
    from quantkit.kernels.triton import norms

    for width in (64, 128, 4096, 8192, 16384):
        recorder.label = f"{width} features"
        x = meta(4, width, dtype=dtype)
        for residual in (None, x):
            norms.rms_norm(x, meta(width, dtype=dtype), 1e-5, 0.0, residual)
    angles = meta(4, 64, dtype=torch.float32)
    for interleaved in (False, True):
        recorder.label = "interleaved" if interleaved else "halves"
        norms.rotary_(meta(4, 32, 128, dtype=dtype), meta(4, 8, 128, dtype=dtype), angles, angles, interleaved)
    for name in ("silu", "gelu_pytorch_tanh"):
        recorder.label = name
        norms.gated(meta(4, 2 * 14336, dtype=dtype), name)


def record(chip: int, dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16)) -> list[Launch]:
    """Every launch that the engine can make on a chip."""
    recorder = Recorder()
    saved = JITFunction.run, kernels.num_processors, kernels.capability
    JITFunction.run = lambda kernel, *values, **named: recorder.record(kernel, *values, **named)
    modules = [
        importlib.import_module(f"{kernels.__name__}.{info.name}") for info in pkgutil.iter_modules(kernels.__path__)
    ]
    for module in modules:
        if hasattr(module, "num_processors"):
            module.num_processors = lambda device: PROCESSORS
        if hasattr(module, "capability"):
            module.capability = lambda device: chip
    try:
        for dtype in dtypes:
            for work in (launch_linears, launch_attention, launch_small):
                work(recorder, dtype)
    finally:
        JITFunction.run = saved[0]
        for module in modules:
            if hasattr(module, "num_processors"):
                module.num_processors = saved[1]
            if hasattr(module, "capability"):
                module.capability = saved[2]
    return list(recorder.launches.values())


def unlaunched(launches: Iterable[Launch]) -> set[str]:
    """Kernels of the package that nothing launched; device functions that kernels call do not count."""
    found = set()
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found.add(name)
    return found - {launch.kernel.__name__ for launch in launches}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs."""

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


def compile_one(launch: Launch, target: int) -> Resources:
    """Compile for a chip and read what the assembler says."""
    name = launch.kernel.__name__
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    try:
        done = triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)
    except Exception as error:  # compilers raise whatever they like
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return Resources(name, launch.label, target, 0, 0, 0, f"{type(error).__name__}: {lines[-1][:160]}")
    registers, spills = _usage(done.asm["cubin"])
    return Resources(name, launch.label, target, registers, done.metadata.shared, spills)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and how many instructions put one into memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = _cuobjdump("-res-usage", file.name)
        numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
        # A stack may be there for other reasons; a spill is a store to it.
        spills = len(re.findall(r"\bSTL\b", _cuobjdump("-sass", file.name))) if numbers.get("STACK") else 0
    return numbers.get("REG", 0), spills


def _cuobjdump(*arguments: str) -> str:
    """Output of the disassembler that comes with Triton."""
    command = [str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def table(found: list[Resources]) -> str:
    """A page: for each kernel and chip the most that any variant needs."""
    lines = [
        "# What the GPU kernels need",
        "",
        "Made by `python evals/gpu/compile_check.py --write docs/kernels-resources.md`, with Triton's own compiler and",
        f"assembler (triton {triton.__version__}); nothing here was run. Per kernel and chip: variants compiled, most",
        "registers of a thread, most shared memory of a block, most stores of spilled registers.",
        "",
        "| kernel | " + " | ".join(f"sm_{target}" for target in SHARED_KIB) + " |",
        "|---|" + "---|" * len(SHARED_KIB),
    ]
    for name in sorted({item.kernel for item in found}):
        cells = []
        for target in SHARED_KIB:
            rows = [item for item in found if item.kernel == name and item.target == target]
            most, shared, spills = (
                max((getattr(row, key) for row in rows), default=0) for key in ("registers", "shared", "spills")
            )
            text = f"{len(rows)}: {most} regs, {shared / 1024:.1f} KiB" + (f", {spills} spilled" if spills else "")
            cells.append(text if rows else "-")
        lines.append(f"| `{name.strip('_')}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compile, print what is wrong, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    parser.add_argument("--targets", type=int, nargs="+", default=list(SHARED_KIB))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--kernel", help="only kernels whose name has this in it")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    found, missing = [], set()
    for target in arguments.targets:
        launches = record(target, [getattr(torch, name) for name in arguments.dtypes])
        missing |= unlaunched(launches)
        for launch in launches:
            if arguments.kernel and arguments.kernel not in launch.kernel.__name__:
                continue
            found.append(compile_one(launch, target))
            if found[-1].problem or arguments.verbose:
                print(found[-1], found[-1].problem, flush=True)
    wrong = [item for item in found if item.problem]
    for name in sorted(missing):
        print(f"{name} is in the package, but nothing here launches it")
    if arguments.write and not wrong and not missing:
        arguments.write.write_text(table(found))
    print(f"{len(found)} compiled, {len(wrong)} with a problem, {len(missing)} kernels unchecked")
    sys.exit(bool(wrong or missing))


if __name__ == "__main__":
    main()
