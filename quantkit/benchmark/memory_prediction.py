"""Predict a model's memory before loading, from config.json and shard headers.

The model is built as the loader builds it, but from headers only. The kernels lay out a few rows of each linear, and
larger sizes are extrapolated.
For weights and cache, predicted and observed bytes are equal; activations are an estimate.
Shapes: N outputs, K inputs, G scales per row, T tokens of a step, L tokens of context.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import InputError
from quantkit.kernels import cpu
from quantkit.kernels.layouts import page_bytes, residual_bytes
from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.types import Linear, LinearFacts
from quantkit.models.kv_sizes import DEFAULT_PAGE_SIZE
from quantkit.models.mtp import MTPHead
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.runtime.model.cache_schemes import read_stored_cache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.expected_tensors import manifest_of, stored_scheme
from quantkit.runtime.model.loader import build_parts, head_scheme, pick_dtype, read_headers
from quantkit.runtime.model.model import config_layouts
from quantkit.runtime.model.mtp import build_draft_head, find_draft_head
from quantkit.runtime.model.weights import Weights

_ROWS = 128  # every further block of this many rows takes the same number of bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Memory that a model will take.

    Args:
        weight_bytes: bytes of all weights in memory.
        page_bytes: bytes of one page of the KV cache in all layers.
        residual_bytes: bytes per sequence of keys and values that are not quantized yet.
        config: config of the model.
        dtype: dtype of the computation.
        native: whether the C kernels will run.
    """

    weight_bytes: int
    page_bytes: int
    residual_bytes: int
    config: ModelConfig
    dtype: torch.dtype
    native: bool

    def activation_bytes(self, tokens: int, context: int, rows: int) -> int:
        """Estimate the peak bytes of activations in one step.

        The peak occurs in attention, in the MLP or in the output head, whichever needs most.

        Args:
            tokens: T, new tokens of the step.
            context: L, length of the longest sequence in the step.
            rows: number of rows whose logits are computed.
        """
        config, size, hidden = self.config, self.dtype.itemsize, self.config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # The residual stream and the pending output, of this layer and of the previous one; then the fused projection
        # and the results of attention, or the two halves of the MLP and their product.
        attention = 4 * hidden + 2 * queries + 2 * keys
        if config.family.recurrent is not None:
            # The projections; then, in float32, the channels, the convolved channels, and what is computed from them:
            # queries, keys, values and outputs.
            shape = config.family.recurrent.shape(config.entries)
            numbers = shape.channels + shape.values
            attention = max(attention, 4 * hidden + numbers + 3 * numbers * 4 // size)
        mlp = 5 * hidden + (3 if config.family.parts.gated else 2) * config.width
        if config.experts is not None:  # one expert at a time, with its tokens gathered
            mlp = 7 * hidden + 3 * max(config.experts.width, config.experts.shared_width or 0)
        layer = tokens * max(attention, mlp) * size
        if not self.native:  # plain torch copies queries, keys and values, including those in the cache
            copied = tokens * (attention + queries + 2 * keys) + 4 * keys * max(0, context - tokens)
            layer = max(layer, copied * size)
        head = rows * (hidden * size + config.vocab_size * (size + 4)) + 2 * tokens * hidden * size
        return max(layer, head) + tokens * config.head_dim * 4  # plus the rotary angles of all new tokens


def predict(
    path: Path | str,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    kv_cache: str = "auto",
    page_size: int = DEFAULT_PAGE_SIZE,
    head_dtype: str | None = None,
    mtp: bool = False,
) -> Prediction | None:
    """Predict the memory that a model takes when it is loaded with these settings; reads only headers.

    Args:
        path: the model directory.
        dtype, device, kv_cache, page_size, head_dtype: as for `LLM`.
        mtp: whether the model's MTP head is loaded too.
    Returns:
        The prediction; None if only transformers can run the model, so that its memory layout is unknown, or if the
        model cannot be loaded. The loader reports the reason later.
    """
    target = torch.device(device)
    on_cpu = target.type == "cpu" and cpu.library() is not None
    _laid_out_bytes.cache_clear()  # the available kernels may have changed
    try:
        reader = CheckpointReader(Path(path))
        config, format_, scheme = read_headers(reader)
        chosen, _ = pick_dtype(dtype, reader, target)
        head = find_draft_head(config, reader) if mtp else None
        layouts = config_layouts(config, read_stored_cache(reader, config), kv_cache, page_size, chosen, head)
        weights = _HeaderWeights(
            reader=ModelReader.of(reader, config.family),
            config=config,
            format=format_,
            scheme=scheme,
            dtype=chosen,
            device=torch.device("cpu"),
            target=target,
            native=on_cpu,
            draft=head,
        )
        _, parts = build_parts(weights)
        if head is not None:
            build_draft_head(weights, head, parts["ropes"])
        weights.head(head_dtype)
    except InputError:
        return None
    return Prediction(
        weight_bytes=weights.num_bytes,
        page_bytes=page_bytes(layouts),
        residual_bytes=residual_bytes(layouts, 1),
        config=config,
        dtype=chosen,
        native=on_cpu,
    )


def max_length(model: Path | str | None) -> int | None:
    """Return the maximum number of tokens per sequence from a model's config.json; None if only transformers can tell.

    Args:
        model: directory or hub id; None = the demo model.
    """
    prediction = predict(resolve(model))
    return None if prediction is None else prediction.config.max_length


@dataclass(kw_only=True, slots=True)
class _HeaderWeights(Weights):
    """Counts the bytes that weights would take, and reads only their headers. *Mutable*.

    Args:
        target: device on which the model would run.
        native: whether the C kernels would run.
        draft: MTP head that is counted too; None = no MTP head.
    """

    target: torch.device
    native: bool
    draft: MTPHead | None
    _sizes: dict[str, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        Weights.__post_init__(self)  # `super()` fails in a dataclass with slots
        self._sizes, _ = manifest_of(self.config, self.draft)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        value = torch.empty(self.reader.info(name).shape, dtype=dtype or self.dtype, device="meta")
        self.num_bytes += value.nbytes
        return value

    def linear(
        self, names: Sequence[str], orders: Mapping[str, Tensor] | None = None, read_share: float = 1.0
    ) -> Linear:
        kinds = [(self._scheme(name), self.stored(f"{name}.weight")) for name in names]
        # If only some of these linears have a bias, the others get zeros.
        bias = any(f"{name}.bias" in self.reader for name in names)
        # As in the loader, linears are fused only if they are stored in the same way.
        for group in [names] if len(set(kinds)) == 1 else [[name] for name in names]:
            rows, width = sum(self._sizes[name][0] for name in group), self._sizes[group[0]][1]
            scheme, stored = kinds[names.index(group[0])]
            if scheme is not None:
                stored = self.stored(f"{group[0]}.weight_scale", torch.float16)
            self._add(rows, width, scheme, bias, stored)
        return _COUNTED

    def exact_linear(self, names: Sequence[str]) -> Linear:
        rows, width = self._sizes[names[0]]
        self.num_bytes += _laid_out_bytes(rows, width, None, False, torch.float32, torch.float32, self.target)
        return _COUNTED

    def dense(self, name: str) -> Tensor:
        value = torch.empty(self._sizes[name], dtype=self.dtype, device="meta")
        self.num_bytes += value.nbytes
        return value

    def stored(self, name: str, otherwise: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype of a tensor in the checkpoint; `otherwise` if there is no such tensor."""
        return self.reader.info(name).dtype if name in self.reader else otherwise or self.dtype

    def head(self, head_dtype: str | None) -> None:
        """Count the bytes of the output head, which may share memory with the embedding if the two are tied."""
        name, rows, width = self.config.family.head, self.config.vocab_size, self.config.hidden_size
        tied, table = self.config.tied, self.stored(f"{self.config.family.embedding}.weight")
        if head_dtype is not None:
            scheme, bias = LinearScheme(weight=head_scheme(head_dtype, width)), f"{name}.bias" in self.reader
            stored = table if tied else self.stored(f"{name}.weight")
            self._add(rows, width, scheme, bias, stored)
        elif not tied:
            self.linear([name])
        elif self.native or table != self.dtype:
            self._add(rows, width, None, False, table)
            if self.native:  # embeddings are then looked up in the head
                self.num_bytes -= rows * width * table.itemsize

    def _add(self, rows: int, width: int, scheme: LinearScheme | None, bias: bool, stored: torch.dtype) -> None:
        self.num_bytes += _laid_out_bytes(rows, width, scheme, bias, stored, self.dtype, self.target)

    def _scheme(self, name: str) -> LinearScheme | None:
        """Return the quantization scheme of a linear; None if the linear is stored unquantized."""
        return stored_scheme(name, self._local.get(name, set()), self.scheme)


_COUNTED = cast(Linear, LinearFacts((0, 0), 0, "counted"))


@functools.cache
def _laid_out_bytes(
    rows: int,
    width: int,
    scheme: LinearScheme | None,
    bias: bool,
    stored: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Return the bytes of a linear (N, K) in the layout of its kernel, extrapolated from smaller linears of zeros.

    Args:
        rows, width: N and K.
        scheme: scheme of the stored weight; None = unquantized.
        bias: whether there is a bias.
        stored: dtype of the weight in the checkpoint; for quantized weights, dtype of the scales.
        dtype, device: dtype and device of the computation.
    """
    if rows >= 3 * _ROWS:
        few, rest = _ROWS + rows % _ROWS, (width, scheme, bias, stored, dtype, device)
        small, large = _laid_out_bytes(few, *rest), _laid_out_bytes(few + _ROWS, *rest)
        return small + (rows - few) // _ROWS * (large - small)
    where: dict[str, Any] = {"bias": torch.zeros(rows, dtype=dtype) if bias else None, "dtype": dtype, "device": device}
    if scheme is None:
        return build_linear(torch.zeros(rows, width, dtype=stored), **where).stored_bytes
    weight, groups = scheme.weight, scheme.weight.num_groups(width)
    tensor = QuantizedTensor(
        codes=torch.zeros(rows, width, dtype=weight.dtype.storage),
        # Microscaling types store scales as bytes; decoded, they are float32 numbers.
        scale=torch.ones(rows, groups, dtype=stored if stored.itemsize > 1 else torch.float32),
        zero_point=None if weight.symmetric else torch.zeros(rows, groups, dtype=torch.int8),
        scheme=weight,
        input_scale=torch.ones(1),
    )
    return build_linear(tensor, activation=scheme.activation, **where).stored_bytes
