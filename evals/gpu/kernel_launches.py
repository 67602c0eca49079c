"""The launches that the engine can make: linears, experts, attention, norms and gates, on tensors without memory.

Each function calls the package's own Python functions on meta tensors in the sizes and number types that models have;
`recorder` keeps what these would launch. Not here: compiling the launches (`compile_check`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from attention import decode_batch
from recorder import Recorder

from quantkit.kernels.gpu import packing
from quantkit.kernels.gpu.packing import PackedWeight, Packing
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

CONTEXT = 8192
# Channels of a head, of the models that there are; any number up to 256 runs.
HEAD_DIMS = (128, 64, 80, 96, 112, 192, 256)
KV_TYPES = {name: kv_scheme(name) for name in ("auto", "fp8", "int8", "int4")}
# Compiled for heads of 64 and 128 channels.
SMALL_KV_TYPES = {name: kv_scheme(name) for name in ("k4v3", "k4v2", "k3v2")}
# Rarer ones, which a checkpoint can ask for; compiled for heads of 128 channels.
RARE_KV_TYPES = {
    "fp8 per token": KVScheme(key=FP8_TOKEN, value=FP8_TOKEN),
    "int4 per token": KVScheme(key=INT4_TOKEN, value=INT4_TOKEN),
    "int8 and int4": KVScheme(key=INT8_TOKEN, value=INT4_TOKEN),
}

# Packed weights: bits of a field, group, dtype of scales (None = the model's), and what else is not usual.
PACKED: dict[str, tuple[int, int, torch.dtype | None, dict[str, Any]]] = {
    "int4 g128": (4, 128, None, {}),
    "int4 g128 asym": (4, 128, None, {"has_zero": True}),
    "int4 g64": (4, 64, None, {}),
    "int4 channel": (4, 0, None, {}),
    "int8 channel": (8, 0, None, {}),
    "int8 g128": (8, 128, None, {}),
    "int8 channel unpacked": (8, 0, torch.float32, {"unpacked": True}),
    "int2 g64 asym": (2, 64, None, {"has_zero": True}),
    "fp8 channel": (8, 0, torch.float32, {"kind": packing.E4M3}),
    "fp8 channel unpacked": (8, 0, torch.float32, {"kind": packing.E4M3, "unpacked": True}),
    "fp8 128x128": (8, 128, torch.float32, {"kind": packing.E4M3}),
    "nvfp4": (4, 16, torch.uint8, {"kind": packing.E2M1, "scales": packing.E4M3_BYTES}),
    "nvfp4, joined": (4, 16, torch.float32, {"kind": packing.E2M1}),
    "mxfp4": (4, 32, torch.uint8, {"kind": packing.E2M1, "scales": packing.EXPONENT_BYTES}),
    "mxfp8": (8, 32, torch.uint8, {"kind": packing.E4M3, "scales": packing.EXPONENT_BYTES}),
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
    kind: str, dtype: torch.dtype, rows: int = 8192, width: int = 4096, experts: tuple[int, ...] = ()
) -> PackedWeight:
    """A weight without memory, or one for each of so many experts; `kind` is of PACKED."""
    bits, group, scale_dtype, variant = PACKED[kind]
    if experts:
        scale_dtype = torch.uint8 if variant.get("scales") else None
    groups, has_zero = 1 if group == 0 else width // group, variant.get("has_zero", False)
    outer = 3.0 if variant.get("scales") == packing.E4M3_BYTES else 1.0
    return PackedWeight(
        words=meta(*experts, rows, width * bits // 32, dtype=torch.int32),
        scale=meta(*experts, groups, rows, dtype=scale_dtype or dtype),
        zero=meta(*experts, groups, rows, dtype=torch.uint8) if has_zero else None,
        shape=(rows, width),
        packing=Packing(bits=bits, span=min((group or 64) // 2, 32), group=group, **variant),
        outer=meta(*experts, dtype=torch.float32) if experts else outer,
    )


def launch_linears(recorder: Recorder, dtype: torch.dtype) -> None:
    """Packed linears: bits, groups, zeros, rows; and what INT8 and FP8 inputs need."""
    from quantkit.kernels.gpu import w4a16

    for name in PACKED:
        weight = _packed(name, dtype)
        width = weight.shape[1]
        if not weight.packing.unpacked:  # else for codes as inputs, below
            usual = (1, 4, 16, 32, 64) if name.startswith("int4") else (1, 16, 64)
            for count in (1, 4) if weight.packing.bits == 2 else usual:
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


def launch_attention(recorder: Recorder, dtype: torch.dtype) -> None:
    """Paged decode, chunks and the store: KV types, head widths, options."""
    plain = AttentionOptions(scale=0.1)
    every = AttentionOptions(scale=0.1, window=512, softcap=30.0)
    for dim in HEAD_DIMS:
        schemes = KV_TYPES | (SMALL_KV_TYPES if dim in (64, 128) else {}) | (RARE_KV_TYPES if dim == 128 else {})
        for kind, scheme in schemes.items():
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
    from quantkit.kernels.gpu import page_store, paged_attention

    layout = KVLayout(num_heads=8, head_dim=dim, page_size=64, dtype=dtype, cache=LayerCache(scheme=scheme))
    windows = layout.new_residuals(32, torch.device("meta"))
    views = layout.views(meta(4096, layout.page_bytes, dtype=torch.uint8), windows)
    states = meta(count, 32, dim, dtype=dtype), meta(count, 8, dim, dtype=dtype), meta(count, 8, dim, dtype=dtype)
    out = meta(count, 32, dim, dtype=dtype)
    recorder.label = f"{label}, batch {count}"
    step, _ = decode_batch(count, CONTEXT, "meta")
    paged_attention.attend(states, views, step, options, out, single=True)
    recorder.label = f"{label}, chunks"
    chunks = replace(step, query_lengths=(512,) * count)
    paged_attention.attend(states, views, chunks, options, out, single=False)
    if windows:
        page_store.store_waiting(*states[1:], views, chunks)
    if dim == 128 and count == 1:
        recorder.label = f"{label}, drafts"
        drafts = replace(chunks, query_lengths=(5,))
        paged_attention.attend(states, views, drafts, options, out, single=False)
    if count > 1 and options.window is None:
        _launch_entries(recorder, label, states, views, step)


def _launch_entries(recorder: Recorder, label: str, states: States, views: KVViews, step: ForwardBatch) -> None:
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
        kv_store.enter(states, views, step, options, angles)


PLAIN = "16 bits"
EXPERTS = ("int4 g128", "int4 g128 asym", "int4 channel", "int8 channel", "fp8 channel", "nvfp4", PLAIN)


def _experts_of(count: int, rows: int, width: int, kind: str, dtype: torch.dtype) -> PackedWeight:
    """Experts without memory."""
    if kind != PLAIN:
        return _packed(kind, dtype, rows, width, (count,))
    words = meta(count, rows, width, dtype=dtype)
    return PackedWeight(words=words, scale=None, zero=None, shape=(rows, width), packing=packing.PLAIN)


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
                recorder.label = f"{picks} of {count} experts, {kind}, {tokens} tokens"
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
