"""A decode step as a list of operations over fixed buffers, which C runs in one call with one team of threads.

The caller records the operations of a model once; `program.c` then runs them for the new tokens of a step. Every
operation gives the same bits as its own function in `kernels.ops`, `linear` or `attention`: threads divide the rows,
panels, heads or channels of an operation, and a sum does not depend on which thread computes it.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_double, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import ResourceError
from quantkit.kernels import cpu
from quantkit.kernels.cpu.attention import Batch, NativeAttention, options_structure
from quantkit.kernels.cpu.linear import NativeLinear
from quantkit.kernels.cpu.ops import GATES, STATE_TYPES
from quantkit.kernels.types import AttentionOptions

# Below this many multiplications per linear, threads would wait for each other longer than they compute.
_PARALLEL_FROM = 1 << 16
_NORM, _LINEAR, _LINEAR_INT8, _ATTENTION, _GATE, _ADD = range(6)
Array = np.ndarray[Any, Any]


class _Op(Structure):
    _fields_ = (
        ("kind", c_int64),
        ("meets", c_int64),
        *[(name, c_void_p) for name in ("what", "x", "residual", "out")],
        *[(name, c_int64) for name in ("width", "stride", "choice")],
        ("eps", c_double),
        ("offset", c_double),
    )


class _Attend(Structure):
    _fields_ = (
        *[(name, c_void_p) for name in ("layer", "options", "query_norm", "key_norm", "angles")],
        ("query_heads", c_int64),
        ("half", c_int64),
        ("eps", c_double),
        ("offset", c_double),
    )


class _Program(Structure):
    _fields_ = (
        ("ops", c_void_p),
        *[(name, c_int64) for name in ("count", "type")],
        *[(name, c_void_p) for name in ("batch", "positions")],
        ("rows", c_int64),
    )


class AngleTable(Structure):
    """Addresses of the tables of cosines and sines (positions, R/2) float32; the tables may move between steps."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p))


class Program:
    """Operations of one decode step, recorded in running order.

    Args:
        rows: maximum number of new tokens in a step, and maximum number of sequences.
        dtype: dtype of all buffers, float32 or bfloat16.
    Attributes:
        lengths: (rows,) int64, new tokens of each sequence; initially 1 for each.
        contexts: (rows,) int64, tokens of each sequence in the cache after the step.
        positions: (rows,) int64, position of each new token in its text.
        residual_rows: (rows,) int64, see `ForwardBatch`.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows, self._dtype = rows, dtype
        self.contexts, self.positions, self.residual_rows = np.zeros((3, rows), dtype=np.int64)
        self.lengths = np.ones(rows, dtype=np.int64)
        self._batch = Batch(
            query_lengths=self.lengths.ctypes.data,
            context_lengths=self.contexts.ctypes.data,
            residual_rows=self.residual_rows.ctypes.data,
        )
        self._ops: list[_Op] = []
        self._kept: list[object] = []  # objects that the pointers of operations refer to
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._products = self._num_linears = 0
        self._program: _Program | None = None

    def buffer(self, name: str, width: int) -> Tensor:
        """Return the buffer (rows, width) with this name and width, which all layers share."""
        key = (name, width)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(self.rows, width, dtype=self._dtype)
        return self._buffers[key]

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, offset: float, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Record `ops.rms_norm`; the sum `x + residual` replaces `residual`. `out` may be `x`."""
        # Two norms need no barrier between them, because the same thread computes a row in both.
        if self._ops and self._ops[-1].kind == _NORM:
            self._ops[-1].meets = 0
        self._kept.append(weight)
        total = None if residual is None else residual.data_ptr()
        self._add(_NORM, weight.data_ptr(), x, out, residual=total, width=x.shape[1], eps=eps, offset=offset)

    def linears(self, linears: Sequence[NativeLinear], x: Tensor, out: Tensor) -> None:
        """Record linears that read the same rows; `out` holds their outputs side by side."""
        at = 0
        for linear in linears:
            self._kept.append(linear)
            kind = _LINEAR_INT8 if linear.is_int8 else _LINEAR
            columns = out[:, at : at + linear.out_features]
            meets, at = linear is linears[-1], at + linear.out_features
            self._add(kind, linear.address, x, columns, stride=out.shape[1], choice=linear.activation, meets=meets)
            self._products += linear.in_features * linear.out_features
            self._num_linears += 1

    def attention(
        self,
        qkv: Tensor,
        attention: NativeAttention,
        options: AttentionOptions,
        angles: AngleTable | None,
        half: int,
        num_heads: int,
        out: Tensor,
    ) -> None:
        """Record attention: normalize and rotate queries and keys in `qkv`, attend, and store keys and values.

        Args:
            qkv: (rows, (Hq + 2 Hkv) D): all queries, all keys, all values.
            attention: attention of the layer.
            options: options of the layer; `interleaved` must be False.
            angles: tables of the rotation; None = no rotation.
            half: R/2.
            num_heads: Hq.
            out: (rows, Hq D).
        """
        norms, scores = options.norms, options_structure(options)
        call = _Attend(
            layer=addressof(attention.structure),
            options=addressof(scores),
            query_norm=None if norms is None else norms.query.data_ptr(),
            key_norm=None if norms is None else norms.key.data_ptr(),
            angles=None if angles is None else addressof(angles),
            query_heads=num_heads,
            half=half,
            eps=0.0 if norms is None else norms.eps,
            offset=0.0 if norms is None else norms.offset,
        )
        self._kept += [attention, norms, scores, angles, call]
        self._add(_ATTENTION, addressof(call), qkv, out)

    def gate(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        """Record `ops.gated` for an activation in `ops.GATES`."""
        self._add(_GATE, None, gate_up, out, width=out.shape[1], choice=GATES[activation])

    def add(self, x: Tensor, out: Tensor) -> None:
        """Record `out += x`."""
        self._add(_ADD, None, x, out, width=out.shape[1])

    def _add(self, kind: int, what: int | None, x: Tensor, out: Tensor, *, meets: bool = True, **fields: Any) -> None:
        self._ops.append(_Op(kind=kind, meets=meets, what=what, x=x.data_ptr(), out=out.data_ptr(), **fields))

    def run(self, rows: int, table: Array) -> None:
        """Run all operations for the first `rows` rows. The caller must have filled their inputs.

        Args:
            rows: new tokens of all sequences.
            table: (sequences, P) int32, page numbers of each sequence.
        Raises:
            ResourceError: there is not enough memory for scratch space.
        """
        if self._program is None:
            self._program = self._finish()
        self._batch.page_table = table.ctypes.data
        self._batch.table_stride = table.strides[0] // 4
        self._batch.sequences = len(table)
        self._program.rows = rows
        is_small = rows * self._products < _PARALLEL_FROM * self._num_linears
        if cpu.function("qk_run_program", "pi", "i")(byref(self._program), 1 if is_small else torch.get_num_threads()):
            raise ResourceError("out of memory for the scratch space of a decode step; lower max_sequences")

    def _finish(self) -> _Program:
        ops = (_Op * len(self._ops))(*self._ops)
        program = _Program(
            ops=addressof(ops),
            count=len(ops),
            type=STATE_TYPES[self._dtype],
            batch=addressof(self._batch),
            positions=self.positions.ctypes.data,
        )
        self._kept.append(ops)
        return program
