"""Launches of everything that `quantkit tune` may choose, for `compile_check.py --candidates`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from recorder import Recorder

from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import choices, configs, paged_decode, paged_prefill, spaces, tuned, w4a16
from quantkit.kernels.gpu.choices import Choice, Cublas
from quantkit.kernels.gpu.packing import PackedWeight, Packing
from quantkit.kernels.layouts import kv_scheme, layer_layout
from quantkit.kernels.types import AttentionOptions, QuantizedActivations

# (bits, group, zeros, unpacked)
WEIGHTS = (
    *[(4, 128, False, False), (4, 128, True, False), (4, 32, True, False), (4, 0, False, False)],
    *[(8, 0, False, False), (8, 128, True, False), (2, 64, True, False), (8, 0, False, True)],
)
ROWS = (1, 4, 16, 32, 64)
HEAD_DIMS = (128, 64, 256)
KV_TYPES = ("auto", "fp8", "int8", "int4")
PAGE = 64


def _chip() -> int:
    """Of the recording."""
    return configs.capability(torch.device("meta"))


def with_neighbours(first: Iterable[Choice]) -> Iterator[Choice]:
    """Each choice, and what is measured around it if it does well and compiles to something else."""
    for choice in first:
        yield choice
        for other in spaces.refined(choice):
            if getattr(other, "stages", 0) != getattr(choice, "stages", 0):
                yield other


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_products(recorder: Recorder, dtype: torch.dtype) -> None:
    """Packed linears by bits, groups and rows."""
    outputs, inputs, span = 8192, 4096, 64
    for bits, group, zeros, unpacked in WEIGHTS:
        groups = 1 if group == 0 else inputs // group
        weight = PackedWeight(
            words=_meta(outputs, inputs * bits // 32, dtype=torch.int32),
            scale=_meta(groups, outputs, dtype=dtype),
            zero=_meta(groups, outputs, dtype=torch.uint8) if zeros else None,
            shape=(outputs, inputs),
            packing=Packing(
                bits=bits,
                span=span if group == 0 or group % span == 0 else group,
                group=group,
                has_zero=zeros,
                unpacked=unpacked,
            ),
        )
        for count in ROWS[:3] if unpacked else ROWS:
            x: torch.Tensor | QuantizedActivations = _meta(count, inputs, dtype=dtype)
            if unpacked:
                scale = _meta(count, 1, dtype=torch.float32)
                x = QuantizedActivations(codes=_meta(count, inputs, dtype=torch.int8), scale=scale, dtype=dtype)
            seeds = spaces.products(count, weight.packing, _chip())
            for choice in with_neighbours(choice for choice in seeds if not isinstance(choice, Cublas)):
                recorder.label = f"int{bits} g{group}{' asym' if zeros else ''}, {count} rows, {tuned.to_json(choice)}"
                with configs.forced(choice):
                    w4a16.multiply(x, weight, None)


def _batch(count: int, new: int) -> ForwardBatch:
    long = {"dtype": torch.int64}
    return ForwardBatch(
        token_ids=_meta(count * new, **long),
        positions=_meta(count * new, **long),
        query_starts=_meta(count + 1, dtype=torch.int32),
        page_table=_meta(count, 128, dtype=torch.int32),
        slots=_meta(count * new, **long),
        residual_rows=_meta(count, **long),
        logit_rows=_meta(count, **long),
        query_lengths=(new,) * count,
        context_lengths=(8192,) * count,
        sequence_ids=tuple(range(count)),
    )


def launch_pages(recorder: Recorder, dtype: torch.dtype) -> None:
    """Attention by KV type and head width: one new token per sequence, and several."""
    options, heads, count = AttentionOptions(scale=0.1), 8, 32
    for dim in HEAD_DIMS:
        for kind in KV_TYPES:
            layout = layer_layout(num_heads=heads, head_dim=dim, page_size=PAGE, dtype=dtype, scheme=kv_scheme(kind))
            residual = _meta(count, heads, layout.residual_tokens, dim, dtype=dtype) if layout.has_residual else None
            views = layout.views(_meta(4096, layout.page_bytes, dtype=torch.uint8), residual)
            halved = kind == "int4"
            default = choices.default_prefill(dim, PAGE, kind != "auto", halved, _chip())
            decodes = spaces.decodes(page_size=PAGE, head_dim=dim, halved=halved)
            for new, seeds in ((1, decodes), (512, spaces.prefills(page_size=PAGE, default=default))):
                batch = _batch(count, new)
                states = tuple(_meta(count * new, number, dim, dtype=dtype) for number in (4 * heads, heads, heads))
                attend = paged_decode.attend_tokens if new == 1 else paged_prefill.attend_chunks
                for choice in with_neighbours(seeds):
                    recorder.label = f"{kind} KV, {dim} channels, {tuned.to_json(choice)}"
                    with configs.forced(choice):
                        attend(states, views, replace(batch), options, torch.empty_like(states[0]))


WORK = (launch_products, launch_pages)
