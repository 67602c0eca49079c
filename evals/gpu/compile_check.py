"""Compile every kernel that quantkit launches, for every chip generation, on a machine without a GPU.

    python evals/gpu/compile_check.py [--write] [--targets 80 90] [--kernel norm] [--jobs 2]
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from recorder import Launch, Recorder, modules, pretended
from resources import PAGE, ROOT, SHARED_KIB, STORE, Resources, Store, compile_all, default_jobs, page
from triton.runtime.jit import JITFunction

from quantkit.kernels.gpu.packing import (
    E2M1,
    E4M3,
    E4M3_BYTES,
    EXPONENT_BYTES,
    INTEGER,
    NUMBERS,
    PLAIN,
    PackedWeight,
    Packing,
)
from quantkit.kernels.layouts import KVLayout, KVViews, kv_scheme
from quantkit.kernels.types import (
    ActivationQuantization,
    AttentionOptions,
    ForwardBatch,
    HeadNorms,
    QuantizedActivations,
    States,
)
from quantkit.numerics.kv_cache import FP8_TOKEN, INT4_TOKEN, INT8_TOKEN, LayerCache
from quantkit.numerics.scheme import KVScheme

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Types in which every launch is compiled for one chip of a generation. Chips of generation 8 need the same shared
# memory for a launch, and registers that differ by a few.
WHOLE = {8: (), 9: ("bf16",), 10: ()}
Launches = dict[tuple[str, int], Launch]
UNLAUNCHED = "in the package, but nothing here launches it"
# Channels of a head, of the models that there are; any number up to 256 runs.
HEAD_DIMS = (128, 64, 80, 96, 112, 192, 256)
KV_TYPES = {name: kv_scheme(name) for name in ("auto", "fp8", "int8", "int4")}
# Rarer ones, which a checkpoint can ask for; compiled for heads of 128 channels.
RARE_KV_TYPES = {
    "fp8 per token": KVScheme(key=FP8_TOKEN, value=FP8_TOKEN),
    "int4 per token": KVScheme(key=INT4_TOKEN, value=INT4_TOKEN),
    "int8 and int4": KVScheme(key=INT8_TOKEN, value=INT4_TOKEN),
}

# Packed weights: bits of a field, group, dtype of scales (None = the model's), and what else is not usual.
PACKED: dict[str, tuple[int, int, torch.dtype | None, dict[str, Any]]] = {
    "int4 g128": (4, 128, None, {}),
    "int4 g128 asym": (4, 128, None, {"zeros": True}),
    "int4 g64": (4, 64, None, {}),
    "int4 channel": (4, 0, None, {}),
    "int8 channel": (8, 0, None, {}),
    "int8 g128": (8, 128, None, {}),
    "int8 channel unpacked": (8, 0, torch.float32, {"unpacked": True}),
    "int2 g64 asym": (2, 64, None, {"zeros": True}),
    "fp8 channel": (8, 0, torch.float32, {"kind": E4M3}),
    "fp8 channel unpacked": (8, 0, torch.float32, {"kind": E4M3, "unpacked": True}),
    "fp8 128x128": (8, 128, torch.float32, {"kind": E4M3}),
    "nvfp4": (4, 16, torch.uint8, {"kind": E2M1, "scales": E4M3_BYTES}),
    "nvfp4, joined": (4, 16, torch.float32, {"kind": E2M1}),
    "mxfp4": (4, 32, torch.uint8, {"kind": E2M1, "scales": EXPONENT_BYTES}),
    "mxfp8": (8, 32, torch.uint8, {"kind": E4M3, "scales": EXPONENT_BYTES}),
}

# Inputs of 8 bits that these are multiplied with; e4m3 comes as bytes.
CODES = {
    "int4 g128": (torch.int8, torch.uint8),
    "int8 channel unpacked": (torch.int8,),
    "fp8 channel": (torch.uint8,),
    "fp8 channel unpacked": (torch.uint8,),
}

# Weights whose product also opens gates; others do that by the same few lines behind another loop.
GATED = ("int4 g128", "int4 g128 asym", "int8 channel", "nvfp4")

QUANTIZATIONS = (
    ActivationQuantization(name="int8"),
    ActivationQuantization(name="fp8"),
    ActivationQuantization(name="fp8", step=0.5),
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _packed(
    bits: int, group: int, scale_dtype: torch.dtype, *, zeros: bool = False, rows: int = 8192, **variant: Any,
) -> PackedWeight:  # fmt: skip
    width = 4096
    groups = 1 if group == 0 else width // group
    return PackedWeight(
        words=meta(rows, width * bits // 32, dtype=torch.int32),
        scale=meta(groups, rows, dtype=scale_dtype),
        zero=meta(groups, rows, dtype=torch.uint8) if zeros else None,
        shape=(rows, width),
        packing=Packing(bits=bits, span=min((group or 64) // 2, 32), group=group, has_zero=zeros, **variant),
        outer=3.0 if variant.get("scales") == E4M3_BYTES else 1.0,
    )


def launch_linears(recorder: Recorder, dtype: torch.dtype) -> None:
    """Packed linears: bits, groups, zeros, rows; and what INT8 and FP8 inputs need."""
    from quantkit.kernels.gpu import w4a16

    for name, (bits, group, scale_dtype, variant) in PACKED.items():
        weight = _packed(bits, group, scale_dtype or dtype, **variant)
        width = weight.shape[1]
        if not weight.packing.unpacked:  # else for codes as inputs, below
            usual = (1, 4, 16, 32, 64) if name.startswith("int4") else (1, 16, 64)
            for count in (1, 4) if bits == 2 else usual:
                recorder.label = f"{name}, {count} rows"
                w4a16.multiply(meta(count, width, dtype=dtype), weight, None)
            for count in (1, 16, 64) if name in GATED else ():
                recorder.label = f"{name}, {count} rows, gates"
                w4a16.multiply(meta(count, width, dtype=dtype), weight, None, "silu")
            recorder.label = f"{name}, dequantized"
            w4a16.dequantize_weight(weight, dtype)
        for codes in CODES.get(name, ()):
            for count in (1, 16) if weight.packing.unpacked else (1, 16, 64):
                recorder.label = f"{name} x {'int8' if codes == torch.int8 else 'fp8'}, {count} rows"
                scale = meta(count, 1, dtype=torch.float32)
                rows = QuantizedActivations(codes=meta(count, width, dtype=codes), scale=scale, dtype=dtype)
                w4a16.multiply(rows, weight, None)
    _launch_quantization(recorder, dtype)


def _launch_quantization(recorder: Recorder, dtype: torch.dtype) -> None:
    from quantkit.kernels.gpu.quantize_activations import dequantize_rows, quantize_rows, scale_sums

    outputs, width = 8192, 4096
    for name in ("int8", "fp8"):
        for step in (None, 0.5):
            recorder.label = f"inputs to {name}" + ("" if step is None else ", fixed scale")
            rows = quantize_rows(meta(64, width, dtype=dtype), ActivationQuantization(name=name, step=step))
        recorder.label = f"{name} inputs to 16 bits"
        dequantize_rows(rows, dtype)
    recorder.label = "inputs to fp8 by groups"
    quantize_rows(meta(64, 128, dtype=dtype), ActivationQuantization(name="fp8"))
    recorder.label = "int8 sums to outputs"
    scale = meta(outputs, dtype=torch.float32)
    scale_sums(meta(64, outputs, dtype=torch.int32), meta(64, 1, dtype=torch.float32), scale, None, dtype)


def _batch(count: int) -> ForwardBatch:
    long = {"dtype": torch.int64}
    return ForwardBatch(
        token_ids=meta(count, **long),
        positions=meta(count, **long),
        query_starts=meta(count + 1, dtype=torch.int32),
        page_table=meta(count, 128, dtype=torch.int32),
        slots=meta(count, **long),
        residual_rows=meta(count, **long),
        logit_rows=meta(count, **long),
        query_lengths=(1,) * count,
        context_lengths=(8192,) * count,
        sequence_ids=tuple(range(count)),
    )


def launch_attention(recorder: Recorder, dtype: torch.dtype) -> None:
    """Paged decode, chunks and the store: KV types, head widths, options."""
    plain = AttentionOptions(scale=0.1)
    every = AttentionOptions(scale=0.1, window=512, softcap=30.0)
    for dim in HEAD_DIMS:
        for kind, scheme in (KV_TYPES | RARE_KV_TYPES if dim == 128 else KV_TYPES).items():
            usual = dim == 128 and kind in KV_TYPES
            for count in (1, 32) if usual else (32,):
                _launch_layer(recorder, f"{kind} KV, {dim} channels", scheme, dim, count, plain, dtype)
            if usual:
                _launch_layer(recorder, f"{kind} KV, {dim} channels, window, cap", scheme, dim, 32, every, dtype)


def _launch_layer(
    recorder: Recorder, label: str, scheme: KVScheme, dim: int, count: int, options: AttentionOptions,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Attention of one layer: a decode step of `count` sequences, their prompts, and what stores them."""
    from quantkit.kernels.gpu import kv_store, paged_attention

    layout = KVLayout(num_heads=8, head_dim=dim, page_size=64, dtype=dtype, cache=LayerCache(scheme=scheme))
    residual = meta(32, 8, layout.residual_tokens, dim, dtype=dtype) if layout.has_residual else None
    views = layout.views(meta(4096, layout.page_bytes, dtype=torch.uint8), residual)
    states = meta(count, 32, dim, dtype=dtype), meta(count, 8, dim, dtype=dtype), meta(count, 8, dim, dtype=dtype)
    out = meta(count, 32, dim, dtype=dtype)
    recorder.label = f"{label}, batch {count}"
    paged_attention.attend(states, views, _batch(count), options, out, single=True)
    recorder.label = f"{label}, chunks"
    chunks = replace(_batch(count), query_lengths=(512,) * count)
    paged_attention.attend(states, views, chunks, options, out, single=False)
    if residual is not None:
        kv_store.store_keys(states[1], views, chunks)
    if dim == 128 and count == 1:
        recorder.label = f"{label}, drafts"
        drafts = replace(chunks, query_lengths=(5,))
        paged_attention.attend(states, views, drafts, options, out, single=False)
    if count > 1 and options.window is None:
        _launch_entries(recorder, label, states, views)


def _launch_entries(recorder: Recorder, label: str, states: States, views: KVViews) -> None:
    """Norm, rotation and store."""
    from quantkit.kernels.gpu import kv_store

    count, _, dim = states[0].shape
    weight = meta(dim, dtype=states[0].dtype)
    norms = HeadNorms(query=weight, key=weight, eps=1e-6, offset=0.0)
    variants = [(False, dim // 2, None), (False, dim // 2, norms)] if dim == 128 else [(True, dim // 4, norms)]
    for interleaved, half, normed in variants:
        angles = (meta(count, half, dtype=torch.float32),) * 2
        options = AttentionOptions(scale=0.1, interleaved=interleaved, norms=normed)
        recorder.label = label + ("" if normed is None else ", norms")
        kv_store.enter(states, views, _batch(count), options, angles)


# Experts: name, bits, group, zeros, what fields and scales are.
EXPERTS: tuple[tuple[str, int, int, bool, int, int], ...] = (
    ("int4 g128", 4, 128, False, INTEGER, NUMBERS),
    ("int4 g128 asym", 4, 128, True, INTEGER, NUMBERS),
    ("int4 gchannel", 4, 0, False, INTEGER, NUMBERS),
    ("int8 gchannel", 8, 0, False, INTEGER, NUMBERS),
    ("fp8 gchannel", 8, 0, False, E4M3, NUMBERS),
    ("nvfp4", 4, 16, False, E2M1, E4M3_BYTES),
    ("16 bits", 16, 0, False, INTEGER, NUMBERS),
)


def _experts_of(
    count: int, rows: int, width: int, kind: tuple[str, int, int, bool, int, int], dtype: torch.dtype
) -> PackedWeight:
    """Experts without memory."""
    _, bits, group, zeros, fields, scales = kind
    groups = 1 if group == 0 else width // group
    packing = Packing(
        bits=bits, span=min(32, (group or 64) // 2), group=group, has_zero=zeros, kind=fields, scales=scales
    )
    if bits == 16:
        words = meta(count, rows, width, dtype=dtype)
        return PackedWeight(words=words, scale=None, zero=None, shape=(rows, width), packing=PLAIN)
    return PackedWeight(
        words=meta(count, rows, width * bits // 32, dtype=torch.int32),
        scale=meta(count, groups, rows, dtype=torch.uint8 if scales else dtype),
        zero=meta(count, groups, rows, dtype=torch.uint8) if zeros else None,
        shape=(rows, width),
        packing=packing,
        outer=meta(count, dtype=torch.float32),
    )


def launch_experts(recorder: Recorder, dtype: torch.dtype) -> None:
    """Mixtures of experts: bits, groups, zeros, tokens; with and without a shared expert."""
    from quantkit.kernels.gpu import experts
    from quantkit.kernels.reference.experts import route

    hidden, width = 2048, 1024
    for count, picks, activation in ((8, 2, "silu"), (128, 8, "gelu_pytorch_tanh")):
        for kind in EXPERTS if count == 8 else EXPERTS[:1]:
            stacked = experts.TritonExperts(
                _experts_of(count, 2 * width, hidden, kind, dtype),
                _experts_of(count, hidden, width, kind, dtype),
                activation=activation,
            )
            choose = partial(route, num_chosen=picks, normalize=count == 8)
            # An expert has T k / E tokens on average.
            for tokens in (1, *(size * count // picks for size in (16, 32, 64, 128))) if count == 8 else (1, 256):
                recorder.label = f"{picks} of {count} experts, {kind[0]}, {tokens} tokens"
                x = meta(tokens, hidden, dtype=dtype)
                shared, score = (x, meta(tokens, 1, dtype=dtype)) if count == 8 else (None, None)
                stacked(x, meta(tokens, count, dtype=dtype), shared, score, choose)


def launch_small(recorder: Recorder, dtype: torch.dtype) -> None:
    """Norms and gates."""
    from quantkit.kernels.gpu import ops

    for width in (64, 128, 4096, 8192, 16384):
        recorder.label = f"{width} features"
        x = meta(4, width, dtype=dtype)
        ops.rms_norm(x, meta(width, dtype=dtype), 1e-5, 0.0)
        ops.rms_norm(x, meta(width, dtype=dtype), 1e-5, 0.0, x)
        for quantization in QUANTIZATIONS if width >= 4096 else ():
            fixed = ", fixed scale" if quantization.step else ""
            recorder.label = f"{width} features to {quantization.name}{fixed}"
            ops.rms_norm(x, meta(width, dtype=dtype), 1e-5, 0.0, x, quantization)
    for name in ("silu", "gelu_pytorch_tanh"):
        recorder.label = name
        ops.gated(meta(4, 2 * 14336, dtype=dtype), name)
    for quantization in QUANTIZATIONS:
        recorder.label = f"silu to {quantization.name}" + (", fixed scale" if quantization.step else "")
        ops.gated(meta(4, 2 * 14336, dtype=dtype), "silu", quantization)


Work = Callable[[Recorder, torch.dtype], None]
WORK: tuple[Work, ...] = (launch_linears, launch_experts, launch_attention, launch_small)


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
        if item.problem or arguments.verbose:
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
    parser.add_argument("--all", action="store_true", help="compile also what is known")
    parser.add_argument("--targets", type=int, nargs="+", default=list(SHARED_KIB))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kernel", default="", help="only kernels whose name has this in it")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare what is launched with what is known")
    arguments = parser.parse_args()
    if arguments.check:
        _check()
    launches = everything()
    chosen = to_compile(launches)
    store = Store() if arguments.all else replace(Store.read(), triton=triton.__version__)
    asked = [
        (at, launch)
        for at, launch in chosen.items()
        if at[1] in arguments.targets and arguments.kernel in launch.name and launch.dtype in arguments.dtypes
    ]
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
