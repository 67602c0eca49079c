"""Bytes of a model before it is loaded: config.json and shard headers say what the weights will be laid out as.

This is arithmetic of its own, not a call into the loader: that prediction and observation agree, to the byte for
weights and cache, is what shows that both are understood. Activations are an estimate, and say so.
N outputs, K inputs, G scales per row, T tokens of a step, L tokens of context.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from quantkit.benchmark.linear_bytes import LinearKernels, dense_bytes, quantized_bytes
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.checkpoints.source import resolve
from quantkit.errors import InputError
from quantkit.kernels import cpu
from quantkit.kernels.layouts import page_bytes, residual_bytes
from quantkit.models.cache import DEFAULT_PAGE_SIZE
from quantkit.models.families import find
from quantkit.numerics.dtype import INT4, INT8
from quantkit.numerics.scheme import LinearScheme, Scheme, WeightScheme
from quantkit.runtime.model.cache_schemes import read_stored_cache
from quantkit.runtime.model.config import ModelConfig, read_config
from quantkit.runtime.model.loader import find_format, pick_dtype
from quantkit.runtime.model.manifest import head_name, manifest_of
from quantkit.runtime.model.model import config_layouts

_HEADS = {"int8": INT8, "int4": INT4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a model will take.

    Args:
        weight_bytes: of all weights in memory.
        page_bytes: of one page of the KV cache, all layers.
        residual_bytes: per sequence, of keys that are not quantized yet.
        config: of the model.
        dtype: of the computation.
        native: by the kernels compiled from C.
    """

    weight_bytes: int
    page_bytes: int
    residual_bytes: int
    config: ModelConfig
    dtype: torch.dtype
    native: bool

    def activation_bytes(self, tokens: int, context: int, rows: int) -> int:
        """Most that a step holds at once beside weights and cache, an estimate: the wider half of a layer, or the head.

        Args:
            tokens: new ones of the step, T.
            context: of its longest sequence, L.
            rows: whose logits are computed.
        """
        config, size, hidden = self.config, self.dtype.itemsize, self.config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # The stream and what is pending, of this layer and of the one before; then the fused projection and what
        # attention makes of it, or the two halves of the MLP and their product.
        attention = 4 * hidden + 2 * queries + 2 * keys
        mlp = 5 * hidden + (3 if config.family.parts.gated else 2) * config.width
        if config.experts is not None:  # one expert at a time, with its tokens gathered
            mlp = 7 * hidden + 3 * max(config.experts.width, config.experts.shared_width or 0)
        layer = tokens * max(attention, mlp) * size
        if not self.native:  # plain torch copies queries, keys and values, those in the cache too
            copied = tokens * (attention + queries + 2 * keys) + 4 * keys * max(0, context - tokens)
            layer = max(layer, copied * size)
        head = rows * (hidden * size + config.vocab_size * (size + 4)) + 2 * tokens * hidden * size
        return max(layer, head) + tokens * config.head_dim * 4  # and the angles of all new tokens


def predict(
    path: Path | str,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    kv_cache: str = "auto",
    page_size: int = DEFAULT_PAGE_SIZE,
    head_dtype: str | None = None,
) -> Prediction | None:
    """What a model directory will take when it is loaded like this; nothing but headers is read.

    Args:
        path: the directory.
        dtype, device, kv_cache, page_size, head_dtype: as for `LLM`.
    Returns:
        None for a model that only transformers runs: how it lays weights out is not known here.
    """
    try:
        reader, config, scheme = _read_headers(Path(path))
    except InputError:
        return None
    target = torch.device(device)
    chosen, _ = pick_dtype(dtype, reader, config, target)
    on_cpu = target.type == "cpu" and cpu.library() is not None
    kernels = LinearKernels(device=target, dtype=chosen, native=on_cpu)
    layouts = config_layouts(config, read_stored_cache(reader, config), kv_cache, page_size, chosen)
    return Prediction(
        weight_bytes=_Sizes(reader=reader, config=config, scheme=scheme, kernels=kernels).total(head_dtype),
        page_bytes=page_bytes(layouts),
        residual_bytes=residual_bytes(layouts, 1),
        config=config,
        dtype=chosen,
        native=on_cpu,
    )


def quantized_linears(path: Path) -> tuple[ModelConfig, list[tuple[str, int, int, LinearScheme]]]:
    """Linears of a checkpoint that are stored quantized, fused as they run; nothing but headers is read.

    Args:
        path: the directory.
    Returns:
        Its config, and of each linear the name of its first module, N, K and scheme.
    Raises:
        ModelError, CheckpointError: there is no such model, or only transformers runs it.
    """
    reader, config, scheme = _read_headers(path)
    kernels = LinearKernels(device=torch.device("cpu"), dtype=torch.bfloat16, native=False)
    products = _Sizes(reader=reader, config=config, scheme=scheme, kernels=kernels).products()
    return config, [(p.name, p.rows, p.width, p.scheme) for p in products if p.scheme is not None]


def max_length(model: Path | str | None) -> int | None:
    """Tokens of a sequence that a model can have, from its config.json; None where only transformers knows.

    Args:
        model: directory or hub id; None = the demo model.
    """
    prediction = predict(resolve(model))
    return None if prediction is None else prediction.config.max_length


def _read_headers(path: Path) -> tuple[CheckpointReader, ModelConfig, Scheme | None]:
    """A checkpoint, its config, and how its linears are stored; None = as values."""
    reader = CheckpointReader(path)
    config = read_config(reader.config, find(reader.config))
    return reader, config, find_format(reader)[1]


class _Product(NamedTuple):
    """Linears (N, K) that run as one, by the name of the first; scheme None = its weight is values."""

    name: str
    rows: int
    width: int
    scheme: LinearScheme | None
    bias: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """What parts of one checkpoint take in memory."""

    reader: CheckpointReader
    config: ModelConfig
    scheme: Scheme | None
    kernels: LinearKernels

    def total(self, head_dtype: str | None) -> int:
        manifest = manifest_of(self.config, self.reader)
        table = f"{self.config.family.embedding}.weight"
        plain = {**manifest.tensors, **{k: v for k, v in manifest.optional.items() if k in self.reader}}
        total = self._head(head_dtype, self._stored(table))
        for name, shape in plain.items():
            if len(shape) == 3:  # all experts of a layer
                count, rows, width = shape
                total += count * dense_bytes(rows, width, False, self._stored(name), self.kernels)
            else:  # the embedding stays as it is stored
                kept = self._stored(name) if name == table else self.kernels.dtype
                total += math.prod(shape) * kept.itemsize
        rounded = head_name(self.config.family, self.reader) if head_dtype is not None else None
        return total + sum(self._product_bytes(product) for product in self.products() if product.name != rounded)

    def products(self) -> Iterator[_Product]:
        """Linears as they are multiplied with: fused where they are stored alike."""
        linears = manifest_of(self.config, self.reader).linears
        for group in self._fused_groups(set(linears)):
            kinds = [(self._scheme_of(name), self._stored(f"{name}.weight")) for name in group]
            bias = any(f"{name}.bias" in self.reader for name in group)  # zero where only others have one
            alike = all(kind == kinds[0] for kind in kinds)
            for names in [group] if alike else [[name] for name in group]:
                rows, width = sum(linears[name][0] for name in names), linears[names[0]][1]
                yield _Product(names[0], rows, width, self._scheme_of(names[0]), bias)

    def _fused_groups(self, linears: set[str]) -> Iterator[list[str]]:
        """Linears as they are fused: query, key and value, and the two that an MLP's input goes through."""
        family, experts = self.config.family, self.config.family.experts
        fused: list[tuple[str, ...]] = [family.parts.qkv, family.parts.up]
        if experts is not None and self.config.experts is not None:
            fused.append(experts.shared_up)
            for number in range(self.config.experts.num_experts):
                fused.append(tuple(name.format(expert=number) for name in experts.up))
        for index, names in itertools.product(range(len(self.config.layers)), fused):
            group = [f"{family.layers}.{index}.{name}" for name in names]
            if group and linears.issuperset(group):
                yield group
                linears -= set(group)
        yield from ([name] for name in sorted(linears))

    def _scheme_of(self, name: str) -> LinearScheme | None:
        """How a linear is stored; None = as values."""
        quantized = f"{name}.weight" not in self.reader or f"{name}.weight_scale" in self.reader
        return self.scheme.find(name) if self.scheme is not None and quantized else None

    def _stored(self, name: str) -> torch.dtype:
        """Of a tensor in the checkpoint; of the computation where there is none of that name."""
        return self.reader.info(name).dtype if name in self.reader else self.kernels.dtype

    def _product_bytes(self, product: _Product) -> int:
        name, rows, width, scheme, bias = product
        if scheme is None:
            return dense_bytes(rows, width, bias, self._stored(f"{name}.weight"), self.kernels)
        scale = f"{name}.weight_scale"
        stored = self.reader.info(scale).dtype if scale in self.reader else torch.float16
        return quantized_bytes(rows, width, scheme, bias, stored, self.kernels)

    def _head(self, head_dtype: str | None, table: torch.dtype) -> int:
        """An output head that is rounded, or that shares the embedding: a copy where kernels have their own layout."""
        rows, width = self.config.vocab_size, self.config.hidden_size
        if head_dtype is None:
            shared = not self.config.tied or (not self.kernels.native and table == self.kernels.dtype)
            return 0 if shared else dense_bytes(rows, width, False, table, self.kernels)
        name = head_name(self.config.family, self.reader)
        bias, stored = f"{name}.bias" in self.reader, table if self.config.tied else self._stored(f"{name}.weight")
        kind = _HEADS[head_dtype]
        size = None if kind is INT8 else next((size for size in (128, 64, 32) if width % size == 0), None)
        scheme = LinearScheme(weight=WeightScheme(dtype=kind, group_size=size))
        return quantized_bytes(rows, width, scheme, bias, stored, self.kernels)
