"""Bytes of a model before it is loaded: config.json and shard headers say what the weights will be laid out as.

This is arithmetic of its own, not a call into the loader: that prediction and observation agree, to the byte for
weights and cache, is what shows that both are understood. Activations are an estimate, and say so.
N outputs, K inputs, G scales per row, T tokens of a step, L tokens of context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.architectures import find
from quantkit.checkpoint.reader import CheckpointReader
from quantkit.checkpoint.source import resolve
from quantkit.errors import InputError
from quantkit.kernels import native
from quantkit.kernels.layouts import KVLayout, kv_dtype, kv_scheme, make_layout, page_bytes, tail_bytes
from quantkit.measure._linear_bytes import Place, dense_bytes, quantized_bytes
from quantkit.numerics.dtype import INT4, INT8
from quantkit.numerics.scheme import LinearScheme, Scheme, WeightScheme
from quantkit.runtime.config import ModelConfig, read_config
from quantkit.runtime.llm import DEMO
from quantkit.runtime.loader import find_format, pick_dtype
from quantkit.runtime.manifest import head_name, is_stacked, make_manifest

_HEADS = {"int8": INT8, "int4": INT4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a model will take.

    Args:
        weight_bytes: of all weights in memory.
        page_bytes: of one page of the KV cache, all layers.
        tail_bytes: per sequence, of keys that are not quantized yet.
        config: of the model.
        dtype: of the computation.
        native: by the kernels compiled from C.
    """

    weight_bytes: int
    page_bytes: int
    tail_bytes: int
    config: ModelConfig
    dtype: torch.dtype
    native: bool

    def activation_bytes(self, tokens: int, context: int, rows: int) -> int:
        """Most that a step holds at once beside weights and cache, an estimate: the wider half of a layer, or the head.

        Args:
            tokens: new ones of the step, T.
            context: of its longest sequence, L.
            rows: whose logits are wanted.
        """
        config, size = self.config, self.dtype.itemsize
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        width = config.width if config.experts is None else config.experts.width * config.experts.num_chosen
        # Attention holds the fused projection, queries and keys in the order of the kernel, and what comes out.
        attention = queries + 2 * keys + 2 * queries + keys
        layer = tokens * (2 * config.hidden_size + max(attention, 3 * width)) * size
        # Only the kernel in plain torch copies what is cached out of its pages.
        cached = 0 if self.native else 2 * keys * max(0, context - tokens) * size
        angles = tokens * config.head_dim * 4
        head = rows * (config.hidden_size * size + config.vocab_size * (size + 4))
        return max(layer + cached, tokens * config.hidden_size * size + head) + angles


def predict(
    path: Path | str,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    kv_cache: str = "auto",
    page_size: int = 64,
    head_dtype: str | None = None,
) -> Prediction | None:
    """What a model directory will take when it is loaded like this; nothing but headers is read.

    Args:
        path: the directory.
        dtype, device, kv_cache, page_size, head_dtype: as for `LLM`.
    Returns:
        None for a model that only transformers runs: how it lays weights out is not known here.
    """
    reader, place = CheckpointReader(Path(path)), torch.device(device)
    try:
        config = read_config(reader.config, find(reader.config))
        format_, scheme = find_format(reader)
    except InputError:
        return None
    chosen, _ = pick_dtype(dtype, reader, config, place)
    on_cpu = place.type == "cpu" and native.load() is not None
    sizes = _Sizes(
        reader=reader,
        config=config,
        scheme=scheme if format_ is not None else None,
        place=Place(device=place, dtype=chosen, native=on_cpu),
    )
    layouts = _layouts(config, kv_cache, chosen, page_size)
    return Prediction(
        weight_bytes=sizes.total(head_dtype),
        page_bytes=page_bytes(layouts),
        tail_bytes=tail_bytes(layouts, 1),
        config=config,
        dtype=chosen,
        native=on_cpu,
    )


def _layouts(config: ModelConfig, kv_cache: str, dtype: torch.dtype, page_size: int) -> list[KVLayout]:
    """How each layer will keep keys and values."""
    return [
        make_layout(
            num_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=kv_dtype(kv_cache, dtype),
            scheme=kv_scheme(kv_cache),
            window=layer.window,
        )
        for layer in config.layers
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """What parts of one checkpoint take in memory."""

    reader: CheckpointReader
    config: ModelConfig
    scheme: Scheme | None
    place: Place

    def total(self, head_dtype: str | None) -> int:
        manifest = make_manifest(self.config, self.reader)
        stacked = self._stacked()
        plain = {**manifest.tensors, **{k: v for k, v in manifest.optional.items() if k in self.reader}}
        total = (
            sum(math.prod(shape) for name, shape in plain.items() if name not in stacked) * self.place.dtype.itemsize
        )
        head = None if self.config.tied else head_name(self.config.architecture, self.reader)
        for group in self._groups(set(manifest.linears) - {head}):
            total += self._group(group, manifest.linears)
        for name in stacked:
            count, rows, width = manifest.tensors[name]
            total += count * dense_bytes(rows, width, False, self.place)
        return total + self._head(head, head_dtype)

    def _stacked(self) -> set[str]:
        """Tensors that hold the weights of all experts of a layer."""
        data, found = self.config.architecture, set()
        for index, layer in enumerate(self.config.layers):
            prefix = f"{data.layers}.{index}."
            if layer.has_experts and data.experts is not None and is_stacked(self.config, prefix, self.reader):
                found |= {f"{prefix}{data.experts.stacked_up}", f"{prefix}{data.experts.stacked_down}"}
        return found

    def _groups(self, linears: set[str]) -> list[list[str]]:
        """Linears as they are fused: query, key and value, and the two that an MLP's input goes through."""
        data, groups, left = self.config.architecture, [], set(linears)
        fused: list[tuple[str, ...]] = [data.parts.qkv, data.parts.up]
        if data.experts is not None and self.config.experts is not None:
            fused += [
                tuple(n.format(expert=e) for n in data.experts.up) for e in range(self.config.experts.num_experts)
            ]
            fused.append(data.experts.shared_up)
        for index in range(len(self.config.layers)):
            for names in fused:
                group = [f"{data.layers}.{index}.{name}" for name in names]
                if group and left.issuperset(group):
                    groups.append(group)
                    left -= set(group)
        return [*groups, *([name] for name in sorted(left))]

    def _group(self, names: list[str], linears: dict[str, tuple[int, int]]) -> int:
        schemes = [self._scheme_of(name) for name in names]
        bias = any(f"{name}.bias" in self.reader for name in names)
        if all(scheme == schemes[0] for scheme in schemes):
            rows, width = sum(linears[name][0] for name in names), linears[names[0]][1]
            return self._linear(rows, width, schemes[0], bias, names[0])
        return sum(
            self._linear(*linears[name], scheme, bias, name) for name, scheme in zip(names, schemes, strict=True)
        )

    def _scheme_of(self, name: str) -> LinearScheme | None:
        """How a linear is stored; None = as values."""
        quantized = f"{name}.weight" not in self.reader or f"{name}.weight_scale" in self.reader
        return self.scheme.find(name) if self.scheme is not None and quantized else None

    def _linear(self, rows: int, width: int, scheme: LinearScheme | None, bias: bool, name: str) -> int:
        if scheme is None:
            return dense_bytes(rows, width, bias, self.place)
        scale = f"{name}.weight_scale"
        stored = self.reader.info(scale).dtype if scale in self.reader else torch.float16
        return quantized_bytes(rows, width, scheme, bias, stored, self.place)

    def _head(self, name: str | None, head_dtype: str | None) -> int:
        """The output head; where it shares the embedding's values, native kernels still have a layout of their own."""
        rows, width = self.config.vocab_size, self.config.hidden_size
        bias = name is not None and f"{name}.bias" in self.reader
        if head_dtype is not None:
            kind = _HEADS[head_dtype]
            size = None if kind is INT8 else next((size for size in (128, 64, 32) if width % size == 0), None)
            scheme = LinearScheme(weight=WeightScheme(dtype=kind, group_size=size))
            return quantized_bytes(rows, width, scheme, bias, self.place.dtype, self.place)
        if name is None:
            return dense_bytes(rows, width, False, self.place) if self.place.native else 0
        return self._group([name], {name: (rows, width)})


def total_bytes(parts: Iterable[int | None]) -> int | None:
    """Their sum; None when one is not known."""
    known = list(parts)
    return None if any(part is None for part in known) else sum(part for part in known if part is not None)


def max_length(model: Path | str | None) -> int | None:
    """Tokens of a sequence that a model can have, from its config.json; None where only transformers knows.

    Args:
        model: directory or hub id; None = the demo model.
    """
    reader = CheckpointReader(DEMO if model is None else resolve(str(model)))
    try:
        return read_config(reader.config, find(reader.config)).max_length
    except InputError:
        return None
