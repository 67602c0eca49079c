"""Paged attention and KV storage with the C kernels: float32 and bf16 on the CPU, every KV type.

`reference.attention` defines the results. The ctypes structures mirror `kv.h`.
"""

from ctypes import Structure, addressof, byref, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import ResourceError
from quantkit.kernels import cpu
from quantkit.kernels.cpu.ops import STATE_TYPES
from quantkit.kernels.layouts import KVViews, PagedArray
from quantkit.kernels.reference.attention import TorchAttention
from quantkit.kernels.reference.kv_codes import is_turned
from quantkit.kernels.types import AttentionOptions, ForwardBatch, States
from quantkit.numerics.dtype import FP8, INT2, INT3, INT4, INT8, DType

_PLAIN_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODE_TYPES: dict[DType, int] = {FP8: 3, INT8: 4, INT4: 5, INT3: 6}
_TURNED_TYPES: dict[DType, int] = {INT3: 7, INT2: 8}
_MOST_CHANNELS = 512  # as in kv_store.c
_GRANULARITIES = {"tensor": 1, "head": 1, "token": 2, "channel": 3}


class _Array(Structure):
    _fields_ = (
        *[(name, c_int64) for name in ("type", "granularity", "width", "codes", "scale", "zero")],
        ("fixed", c_void_p),
        ("residual", c_void_p),
    )


class _Layer(Structure):
    _fields_ = (
        ("pool", c_void_p),
        *[(name, c_int64) for name in ("page_bytes", "page_size", "heads", "residual_tokens", "residual_type")],
        ("key", _Array),
        ("value", _Array),
    )


class Batch(Structure):
    """The C structure `kv_batch` of kv.h."""

    _fields_ = (
        *[(name, c_void_p) for name in ("page_table", "query_lengths", "context_lengths", "residual_rows")],
        ("sequences", c_int64),
        ("table_stride", c_int64),
    )
    owned: tuple[Any, ...]  # what the pointers refer to, kept alive with the structure


class _Options(Structure):
    _fields_ = (("scale", c_double), ("softcap", c_double), ("window", c_int64))


_latest: tuple[ForwardBatch, Any] | None = None


def _prepare(batch: ForwardBatch) -> Any:
    """Return the batch in C form, built once per step for all layers. The caller must keep it alive while C runs."""
    global _latest
    # Read once, because another thread may prepare a batch of its own meanwhile.
    latest = _latest
    # Compared by identity: batches that are equal on the host may have different tensors.
    if latest is None or latest[0] is not batch:
        table = batch.page_table.to(torch.int32).contiguous()
        rows = batch.residual_rows.to(torch.int64).contiguous()
        count = len(batch.query_lengths)
        queries = (c_int64 * count)(*batch.query_lengths)
        contexts = (c_int64 * count)(*batch.context_lengths)
        structure = Batch(
            page_table=table.data_ptr(),
            query_lengths=addressof(queries),
            context_lengths=addressof(contexts),
            residual_rows=rows.data_ptr(),
            sequences=count,
            table_stride=table.shape[1],
        )
        structure.owned = table, rows, queries, contexts
        latest = _latest = batch, byref(structure)
    return latest[1]


def is_available(views: KVViews) -> bool:
    """Whether the C kernels can read these pages."""
    few_bits = any(array.scheme.dtype in (INT3, INT2) for array in (views.key, views.value))
    if few_bits and views.layout.head_dim > _MOST_CHANNELS:
        return False
    return views.pool.is_cpu and cpu.library() is not None


def options_structure(options: AttentionOptions) -> Structure:
    """Return the options that C reads: scale, softcap and window."""
    return _Options(scale=options.scale, softcap=options.softcap or 0.0, window=options.window or 0)


class NativeAttention:
    """Attention of one layer in C. `ops.Stepwise` calls it with normalized and rotated states.

    Attributes:
        structure: the C structure `kv_layer` of kv.h.
    """

    def __init__(self, views: KVViews) -> None:
        self._attend = cpu.function("qk_attend", "pppppppnnnnii", "i")
        self._plain = TorchAttention(views)
        self.structure = _layer(views)  # points into tensors that `_plain` keeps alive
        self._layer = byref(self.structure)
        self._options: AttentionOptions | None = None  # of the last call; a layer's options never change
        self._options_pointer: Any = None

    def __call__(self, states: States, batch: ForwardBatch, options: AttentionOptions) -> Tensor:
        query, key, value = states
        kind = STATE_TYPES.get(query.dtype)
        if kind is None or not query.dtype == key.dtype == value.dtype:
            return self._plain(states, batch, options)
        if options is not self._options:
            self._options, self._options_pointer = options, byref(options_structure(options))
        query, key, value = _dense_heads(query), _dense_heads(key), _dense_heads(value)
        out = torch.empty_like(query)
        failed = self._attend(
            self._layer, _prepare(batch), self._options_pointer, query.data_ptr(), key.data_ptr(), value.data_ptr(),
            out.data_ptr(), query.stride(0), key.stride(0), value.stride(0), query.shape[1], kind,
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise ResourceError("out of memory for the scratch space of attention; lower token_budget")
        return out


def _dense_heads(states: Tensor) -> Tensor:
    """Return (T, H, D) with contiguous heads; copies only if they are not contiguous."""
    _, heads, channels = states.stride()
    return states if channels == 1 and heads == states.shape[2] else states.contiguous()


def _type_of(side: PagedArray) -> int:
    dtype = side.scheme.dtype
    if dtype is None:
        return _PLAIN_TYPES[side.codes.dtype]
    return (_TURNED_TYPES if is_turned(side.scheme) else _CODE_TYPES)[dtype]


def _layer(views: KVViews) -> _Layer:
    layout, blocks = views.layout, views.layout.blocks()

    def array(name: str, side: PagedArray, residual: Tensor | None) -> _Array:
        offsets = {
            name_in_c: blocks[key].offset if (key := f"{name}{suffix}") in blocks else -1
            for name_in_c, suffix in (("codes", ""), ("scale", "_scale"), ("zero", "_zero"))
        }
        dtype = side.scheme.dtype
        return _Array(
            type=_type_of(side),
            granularity=0 if dtype is None else _GRANULARITIES[side.scheme.granularity],
            width=layout.head_dim,
            fixed=None if side.fixed is None else side.fixed.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            **offsets,
        )

    return _Layer(
        pool=views.pool.data_ptr(),
        page_bytes=layout.page_bytes,
        page_size=layout.page_size,
        heads=layout.num_heads,
        residual_tokens=layout.residual_tokens,
        residual_type=_PLAIN_TYPES[layout.dtype],
        key=array("key", views.key, views.key_residual),
        value=array("value", views.value, views.value_residual),
    )
