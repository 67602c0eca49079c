"""Paged attention and the KV store by the C kernels: float32 and bf16 on the CPU, every KV type.

What they do is written in `attention`, the plain version; structures mirror `native/kv.h`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import Structure, addressof, byref, c_double, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import ResourceError
from quantkit.kernels import native
from quantkit.kernels._native_ops import STATE_TYPES
from quantkit.kernels.attention import AttentionOptions, TorchAttention
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.layouts import KVViews, PagedArray
from quantkit.numerics.dtype import FP8, INT4, INT8, DType

_PLAIN_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODE_TYPES: dict[DType, int] = {FP8: 3, INT8: 4, INT4: 5}
_GRANULARITIES = {"tensor": 1, "token": 2, "channel": 3}


class _Array(Structure):
    _fields_ = (
        *[(name, c_int64) for name in ("type", "granularity", "width", "codes", "scale", "zero")],
        ("fixed_scale", c_double),
    )


class _Layer(Structure):
    _fields_ = (
        ("pool", c_void_p),
        ("tail", c_void_p),
        *[(name, c_int64) for name in ("page_bytes", "page_size", "heads", "tail_tokens", "tail_type")],
        ("key", _Array),
        ("value", _Array),
    )


class _Batch(Structure):
    _fields_ = (
        *[(name, c_void_p) for name in ("page_table", "query_lengths", "context_lengths", "tail_rows")],
        ("sequences", c_int64),
        ("table_stride", c_int64),
    )


class _Prepared(NamedTuple):
    """A batch as C sees it, with what must live as long."""

    batch: ForwardBatch
    reference: Any
    owned: tuple[Any, ...]


_latest: _Prepared | None = None


def _prepare(batch: ForwardBatch) -> Any:
    """Pointer to the batch for C; made once per step, since all layers ask for the same one."""
    global _latest
    latest = _latest
    if latest is None or latest.batch is not batch:
        table = batch.page_table.to(torch.int32).contiguous()
        rows = batch.tail_rows.to(torch.int64).contiguous()
        count = len(batch.query_lengths)
        queries = (c_int64 * count)(*batch.query_lengths)
        contexts = (c_int64 * count)(*batch.context_lengths)
        structure = _Batch(
            page_table=table.data_ptr(),
            query_lengths=addressof(queries),
            context_lengths=addressof(contexts),
            tail_rows=rows.data_ptr(),
            sequences=count,
            table_stride=table.shape[1],
        )
        latest = _latest = _Prepared(batch, byref(structure), (table, rows, queries, contexts, structure))
    return latest.reference


class _Functions(NamedTuple):
    attend: Callable[..., int]
    store: Callable[..., int]


@functools.cache
def _functions() -> _Functions | None:
    pointer, size = c_void_p, c_int64
    common = (pointer, pointer)  # layer, batch
    attend = native.function(
        "qk_attend",
        *common,
        *[pointer] * 4,
        *[size] * 4,
        c_int,
        c_double,
        size,
        c_double,
        pointer,
        c_int,
        returns=c_int,
    )
    store = native.function("qk_store", *common, pointer, pointer, size, size, c_int, c_int, returns=c_int)
    return None if attend is None or store is None else _Functions(attend, store)


def is_available(views: KVViews) -> bool:
    """Whether the C kernels can read these pages."""
    return views.pool.is_cpu and _functions() is not None


class NativeAttention:
    """Attention of one layer in C; see `ops.PagedAttention`."""

    def __init__(self, views: KVViews) -> None:
        functions = _functions()
        assert functions is not None
        self._plain = TorchAttention(views)
        self._attend, self._store = functions
        self._structure = _layer(views)
        self._layer = byref(self._structure)
        self._shape = (views.layout.head_dim, views.layout.value_width)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch, options: AttentionOptions
    ) -> Tensor:
        """See `ops.PagedAttention`."""
        kind = STATE_TYPES.get(query.dtype)
        if kind is None or not query.dtype == key.dtype == value.dtype:
            return self._plain(query, key, value, batch, options)
        query, key, value = _dense_heads(query), _dense_heads(key), _dense_heads(value)
        key_width, value_width = self._shape
        out = torch.empty_like(query) if key_width == value_width else _empty(query, value_width)
        pointers = key.data_ptr(), value.data_ptr()
        strides = key.stride(0), value.stride(0)
        step, threads = _prepare(batch), torch.get_num_threads()
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        failed = self._attend(
            self._layer,
            step,
            query.data_ptr(),
            *pointers,
            out.data_ptr(),
            query.stride(0),
            *strides,
            query.shape[1],
            kind,
            options.scale,
            options.window or 0,
            options.softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            threads,
        )
        if failed or self._store(self._layer, step, *pointers, *strides, kind, threads):
            raise ResourceError("no memory is left for the scratch space of attention; lower the token budget")
        return out


def _empty(query: Tensor, width: int) -> Tensor:
    return torch.empty((query.shape[0], query.shape[1], width), dtype=query.dtype)


def _dense_heads(states: Tensor) -> Tensor:
    """(T, H, D) whose heads lie one after another; a copy only where they do not."""
    _, heads, channels = states.stride()
    return states if channels == 1 and heads == states.shape[2] else states.contiguous()


def _layer(views: KVViews) -> _Layer:
    layout, tail = views.layout, views.key_tail
    blocks = layout.blocks()

    def array(name: str, side: PagedArray, width: int) -> _Array:
        offsets = {
            part: blocks[key].offset if (key := f"{name}{suffix}") in blocks else -1
            for part, suffix in (("codes", ""), ("scale", "_scale"), ("zero", "_zero"))
        }
        dtype = side.scheme.dtype
        return _Array(
            type=_PLAIN_TYPES[side.codes.dtype] if dtype is None else _CODE_TYPES[dtype],
            granularity=0 if dtype is None else _GRANULARITIES[side.scheme.granularity],
            width=width,
            fixed_scale=side.fixed_scale,
            **offsets,
        )

    return _Layer(
        pool=views.pool.data_ptr(),
        tail=None if tail is None else tail.data_ptr(),
        page_bytes=layout.page_bytes,
        page_size=layout.page_size,
        heads=layout.num_heads,
        tail_tokens=layout.tail_tokens,
        tail_type=_PLAIN_TYPES[layout.dtype],
        key=array("key", views.key, layout.head_dim),
        value=array("value", views.value, layout.value_width),
    )
