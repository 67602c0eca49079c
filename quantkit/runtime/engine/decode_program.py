"""Decode steps on a CPU as one native call, a single call of C code that runs all layers of the model.

If a model is small, the Python code between its kernels takes as long as the kernels. `record` walks a model once and
lists the kernel calls that `NativeModel.forward` would make; `kernels.cpu.program` then makes all these calls in C. The
results are the same bit for bit. Programs cover dense decoders with RMS norms and gated feed-forward layers. `record`
refuses other models; their steps run layer by layer, as do steps with prompt tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quantkit.kernels import cpu
from quantkit.kernels.cpu.attention import NativeAttention
from quantkit.kernels.cpu.linear import NativeLinear
from quantkit.kernels.cpu.ops import GATES, STATE_TYPES
from quantkit.kernels.cpu.program import AngleTable, Array, Program
from quantkit.kernels.ops import Stepwise
from quantkit.kernels.types import Linear
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk
from quantkit.runtime.model.adapters import AdaptedLinear
from quantkit.runtime.model.layers import MLP, Attention, Block, Norm, RMSNorm, SideBySide
from quantkit.runtime.model.model import NativeModel


class Unsupported(Exception):
    """A model has a part that no program covers; the message names this part."""


_MAX_DRAFTED = 32  # new tokens of a step with drafts; with more tokens, Python's share of the time is small


class DecodeProgram:
    """Runs decode steps, with or without drafts, of a model and its cache; buffers grow to the largest step so far.

    Args:
        model: model to run.
        cache: KV cache.
        builder: builder that holds the page table.
        max_sequences: maximum number of sequences in one batch.
    Raises:
        Unsupported: the model has a part that no program covers.
    Attributes:
        hidden: hidden states of the last step, followed by unused rows; see `NativeModel.compute`.
    """

    def __init__(self, model: NativeModel, cache: KVCache, builder: BatchBuilder, *, max_sequences: int) -> None:
        self._model, self._cache, self._builder = model, cache, builder
        self._most = max(max_sequences, _MAX_DRAFTED)
        self._angles = [AngleTable() for _ in model.tables]
        self._tokens = np.zeros(self._most, dtype=np.int64)
        self._token_ids = torch.from_numpy(self._tokens)
        self.hidden: Tensor | None = None
        # Keyed by the name of the adapter; see `record`.
        self._recorded: dict[str | None, tuple[Program, Tensor, Tensor, Tensor]] = {}
        for adapter in (None, *model.adapters.by_name):
            self._prepare(adapter, 1)

    def _prepare(self, adapter: str | None, rows: int) -> None:
        self._recorded[adapter] = record(self._model, self._cache, self._angles, rows, adapter)

    def run(self, chunks: Sequence[ScheduledChunk], tokens: Tensor | None = None) -> Tensor | None:
        """Return the logits of a decode step.

        Args:
            chunks, tokens: see `Runner.step`.
        Returns:
            Logits of each chunk, valid until the next call; None if the step has prompt tokens or too many drafts, if
            sequences have different adapters, or if a sequence is so long that the wavelengths of its rotary embedding
            depend on its length.
        """
        adapter, count, length = chunks[0].holder.adapter, 0, 0
        for holder, new, start, num_logits in chunks:
            if len(new) != num_logits or holder.adapter != adapter:
                return None
            count, length = count + num_logits, max(length, start + num_logits)
        if count > self._most or not self._update_angles(length):
            return None
        if count > self._recorded[adapter][0].rows:
            self._prepare(adapter, min(self._most, 1 << (count - 1).bit_length()))
        program, stream, hidden, scores = self._recorded[adapter]
        self.hidden = None if self._model.mtp is None else hidden
        table = self._fill(program, chunks)
        stream[:count] = self._model.embed(self._token_ids[:count] if tokens is None else tokens)
        program.run(count, table)
        return self._model.scaled_logits(scores[:count])

    def _fill(self, program: Program, chunks: Sequence[ScheduledChunk]) -> Array:
        """Write a step's tokens, positions, lengths and cache rows for the program; return the page table."""
        at = 0
        for index, (holder, new, start, _) in enumerate(chunks):
            count = len(new)
            if count == 1:  # the usual case, in which slices would cost more
                self._tokens[at], program.positions[at] = new[0], start
            else:
                self._tokens[at : at + count] = new
                program.positions[at : at + count] = range(start, start + count)
            program.lengths[index], program.residual_rows[index] = count, holder.row
            program.contexts[index] = start - holder.num_evicted + count
            at += count
        longest = -(-int(program.contexts[: len(chunks)].max()) // self._cache.page_size)
        return self._builder.table_of(chunks, longest)

    def _update_angles(self, length: int) -> bool:
        """Give the program the angles of positions below `length`.

        Return False if these angles depend on the length of the sequence, so that no table can hold them.
        """
        for table, addresses in zip(self._model.tables, self._angles, strict=True):
            if length > (table.rope.turning_length or length):
                return False
            table.reserve(length)
            addresses.cos, addresses.sin = table.cos.data_ptr(), table.sin.data_ptr()
        return True


def record(
    model: NativeModel, cache: KVCache, angles: Sequence[AngleTable], rows: int, adapter: str | None = None
) -> tuple[Program, Tensor, Tensor, Tensor]:
    """Record a decode step of a model.

    Args:
        model: model to run.
        cache: KV cache.
        angles: an angle table for each rotary embedding of the model; their addresses are set before each step.
        rows: maximum number of new tokens.
        adapter: name of the adapter that all sequences use; None = the base model.
    Returns:
        The program and three of its buffers: the input embeddings (rows, H), which the program overwrites; the hidden
        states (rows, H) after the final norm; and the scores (rows, V) of the output projection.
    Raises:
        Unsupported: the model has a part that no program covers.
    """
    _require(cpu.library() is not None, f"C kernels are {cpu.status()}")
    _require(
        model.device.type == "cpu" and model.dtype in STATE_TYPES,
        f"there are no C kernels for {model.dtype} on {model.device}",
    )
    _require(model.streams is None, "several residual streams")
    recorder = _Recorder(model, cache, angles, Program(rows, model.dtype), adapter)
    pending: Tensor | None = None
    for block in model.blocks:
        if not isinstance(block, Block):
            raise Unsupported("several residual streams")
        pending = recorder.block(block, pending)
    return recorder.program, recorder.stream, *recorder.head(pending)


class _Recorder:
    """Records the kernel calls of a model's parts; each buffer is named after the values that it holds."""

    def __init__(
        self, model: NativeModel, cache: KVCache, angles: Sequence[AngleTable], program: Program, adapter: str | None
    ) -> None:
        self._model, self._cache, self._angles, self.program = model, cache, angles, program
        self._adapter = adapter
        self.stream = program.buffer("stream", model.config.hidden_size)

    def block(self, block: Block, pending: Tensor | None) -> Tensor:
        """Record `Block.__call__`; return the buffer of the output that the next norm adds to the stream."""
        _require(not block.parallel, "attention and feed-forward layers side by side")
        _require(block.scale == 1.0, "a factor on additions to the residual stream")
        if not isinstance(block.attention, Attention):
            raise Unsupported("layers without attention, or with attention to latent or recurrent states")
        if not isinstance(block.mlp, MLP):
            raise Unsupported("mixtures of experts, or layers without a feed-forward part")
        entered = self._norm(block.input_norm, self.stream if pending is None else pending, pending is not None)
        attended = self._attention(block, block.attention, entered)
        if block.attention_norm is not None:
            self._norm(block.attention_norm, attended, out=attended)
        entered = self._norm(block.mlp_norm, attended, True)
        added = self._mlp(block.mlp, entered)
        if block.output_norm is not None:
            self._norm(block.output_norm, added, out=added)
        return added

    def head(self, pending: Tensor | None) -> tuple[Tensor, Tensor]:
        """Record the final norm and the output head; return the buffers of the norm's outputs and the head's scores."""
        normed = self._norm(self._model.final_norm, self.stream if pending is None else pending, pending is not None)
        return normed, self._linear(self._model.head, normed, "scores")

    def _attention(self, block: Block, attention: Attention, entered: Tensor) -> Tensor:
        paged, options = self._cache.attention[attention.layer], attention.options
        if not isinstance(paged, Stepwise) or not isinstance(paged.inner, NativeAttention) or paged.matrix is not None:
            raise Unsupported("attention with sinks, or a rotated KV cache")
        _require(attention.norms is None, "norms of queries and keys over all heads, or after the rotation")
        _require(
            not attention.is_gated and attention.clip is None and attention.growth is None,
            "attention with gates, clipping or position-dependent factors",
        )
        _require(not options.interleaved, "rotary embeddings that rotate neighbouring channels")
        norms = options.norms
        _require(
            norms is None or norms.query.dtype == norms.key.dtype == self._model.dtype,
            "norms whose dtype differs from the model's",
        )
        qkv = self._linear(attention.qkv, entered, "qkv")
        attended = self.program.buffer("attended", attention.num_heads * attention.head_dim)
        angles, half = (None, 0) if block.rope is None else (self._angles[block.rope], self._half(block.rope))
        self.program.attention(qkv, paged.inner, options, angles, half, attention.num_heads, attended)
        return self._linear(attention.output, attended, "added")

    def _half(self, rope: int) -> int:
        return self._model.tables[rope].cos.shape[1]

    def _mlp(self, mlp: MLP, entered: Tensor) -> Tensor:
        _require(
            mlp.gated and mlp.curve is None and mlp.activation in GATES,
            "a feed-forward layer without a gate, or with an activation that no C kernel has",
        )
        gate_up = self._linear(mlp.up, entered, "gate and up")
        opened = self.program.buffer("opened", gate_up.shape[1] // 2)
        self.program.gate(gate_up, mlp.activation, opened)
        return self._linear(mlp.down, opened, "added")

    def _norm(self, norm: Norm | None, x: Tensor, adds: bool = False, out: Tensor | None = None) -> Tensor:
        """Record a norm of x, or of x added to the stream; return the buffer of the result."""
        if not isinstance(norm, RMSNorm) or norm.weight.shape != (x.shape[1],):
            raise Unsupported("layers without RMS norms before attention and feed-forward layers")
        _require(
            norm.weight.dtype == self._model.dtype and norm.quantization is None,
            "norms whose dtype differs from the model's, or whose output is quantized",
        )
        out = self.program.buffer("normed", x.shape[1]) if out is None else out
        self.program.norm(x, norm.weight, norm.eps, norm.offset, out, self.stream if adds else None)
        return out

    def _linear(self, linear: Linear, x: Tensor, name: str) -> Tensor:
        if isinstance(linear, AdaptedLinear):
            out, update = self._linear(linear.base, x, name), linear.updates.get(self._adapter or "")
            if update is not None:
                down, up = update
                self.program.add(self._linear(up, self._linear(down, x, "low rank"), f"update of {name}"), out)
            return out
        parts = linear.linears if isinstance(linear, SideBySide) else (linear,)
        natives = [part for part in parts if isinstance(part, NativeLinear) and part.dtype == self._model.dtype]
        _require(len(natives) == len(parts), f"a linear that no C kernel computes: {linear.description}")
        out = self.program.buffer(name, linear.out_features)
        self.program.linears(natives, x, out)
        return out


def _require(condition: bool, reason: str) -> None:
    """Refuse a model that does not meet a condition.

    Args:
        condition: whether the model meets it.
        reason: part of the model that no program covers, in words for users.
    """
    if not condition:
        raise Unsupported(reason)
