"""Bytes of a model before it is loaded: config.json and shard headers say what the weights will be laid out as.

The model is put together as the loader does it, of weights of which only headers are read; what their layouts take is
arithmetic of its own. That prediction and observation agree, to the byte for weights and cache, is what shows that both
are understood. Activations are an estimate, and say so.
N outputs, K inputs, G scales per row, T tokens of a step, L tokens of context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import InputError
from quantkit.kernels import cpu
from quantkit.kernels.layouts import page_bytes, residual_bytes
from quantkit.kernels.types import Linear, LinearFacts
from quantkit.models.cache import DEFAULT_PAGE_SIZE
from quantkit.numerics.scheme import LinearScheme
from quantkit.runtime.model.cache_schemes import read_stored_cache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.expected_tensors import manifest_of, stored_scheme
from quantkit.runtime.model.loader import build_parts, head_scheme, pick_dtype, read_headers
from quantkit.runtime.model.model import config_layouts
from quantkit.runtime.model.weights import Weights

_PANEL = 64  # outputs that the native kernels lay out together
_TORCH_GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Memory that a model will take.

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
        if config.family.recurrent is not None:
            # What is projected; then channels in float32, convolved, and queries, keys, values and outputs out of them.
            shape = config.family.recurrent.shape(config.entries)
            numbers = shape.channels + shape.values
            attention = max(attention, 4 * hidden + numbers + 3 * numbers * 4 // size)
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
    """Predict the memory of a model directory that is loaded like this; nothing but headers is read.

    Args:
        path: the directory.
        dtype, device, kv_cache, page_size, head_dtype: as for `LLM`.
    Returns:
        None for a model that only transformers runs, as how it lays weights out is not known here; and for one that
        cannot be loaded, which the loader has the words for.
    """
    target = torch.device(device)
    on_cpu = target.type == "cpu" and cpu.library() is not None
    try:
        reader = CheckpointReader(Path(path))
        config, format_, scheme = read_headers(reader)
        chosen, _ = pick_dtype(dtype, reader, target)
        layouts = config_layouts(config, read_stored_cache(reader, config), kv_cache, page_size, chosen)
        weights = _HeaderWeights(
            reader=ModelReader.of(reader, config.family),
            config=config,
            format=format_,
            scheme=scheme,
            dtype=chosen,
            device=torch.device("cpu"),
            kernels=LinearKernels(device=target, dtype=chosen, native=on_cpu),
        )
        build_parts(weights)
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
    """Tokens of a sequence that a model can have, from its config.json; None where only transformers knows.

    Args:
        model: directory or hub id; None = the demo model.
    """
    prediction = predict(resolve(model))
    return None if prediction is None else prediction.config.max_length


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearKernels:
    """The kernels that run linears.

    Args:
        device: of the model.
        dtype: of the computation.
        native: by the kernels compiled from C.
    """

    device: torch.device
    dtype: torch.dtype
    native: bool


@dataclass(kw_only=True, slots=True)
class _HeaderWeights(Weights):
    """Weights of which only headers are read: what they would take is counted. *Mutable*.

    Args:
        kernels: that would run the linears.
    """

    kernels: LinearKernels
    _sizes: dict[str, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        Weights.__post_init__(self)  # `super` does not know a class with slots
        self._sizes, _ = manifest_of(self.config)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        value = torch.empty(self.reader.info(name).shape, dtype=dtype or self.dtype, device="meta")
        self.num_bytes += value.nbytes
        return value

    def linear(
        self, names: Sequence[str], orders: Mapping[str, Tensor] | None = None, read_share: float = 1.0
    ) -> Linear:
        kinds = [(self._scheme(name), self.stored(f"{name}.weight")) for name in names]
        bias = any(f"{name}.bias" in self.reader for name in names)  # zero where only others have one
        # Linears are fused only where they are stored alike, as the loader does.
        for group in [names] if len(set(kinds)) == 1 else [[name] for name in names]:
            rows, width = sum(self._sizes[name][0] for name in group), self._sizes[group[0]][1]
            scheme, stored = kinds[names.index(group[0])]
            if scheme is None:
                self.num_bytes += dense_bytes(rows, width, bias, stored, self.kernels)
            else:
                scale = self.stored(f"{group[0]}.weight_scale", torch.float16)
                self.num_bytes += quantized_bytes(rows, width, scheme, bias, scale, self.kernels)
        return _COUNTED

    def exact_linear(self, names: Sequence[str]) -> Linear:
        rows, width = self._sizes[names[0]]
        self.num_bytes += dense_bytes(rows, width, False, torch.float32, replace(self.kernels, dtype=torch.float32))
        return _COUNTED

    def dense(self, name: str) -> Tensor:
        value = torch.empty(self._sizes[name], dtype=self.dtype, device="meta")
        self.num_bytes += value.nbytes
        return value

    def stored(self, name: str, otherwise: torch.dtype | None = None) -> torch.dtype:
        """Dtype of a tensor in the checkpoint; that of the computation where there is none of that name."""
        return self.reader.info(name).dtype if name in self.reader else otherwise or self.dtype

    def head(self, head_dtype: str | None) -> None:
        """Count the output head, or a copy of the embedding where that cannot be multiplied with as it is."""
        name, rows, width = self.config.family.head, self.config.vocab_size, self.config.hidden_size
        tied, table = self.config.tied, self.stored(f"{self.config.family.embedding}.weight")
        if head_dtype is not None:
            scheme, bias = LinearScheme(weight=head_scheme(head_dtype, width)), f"{name}.bias" in self.reader
            stored = table if tied else self.stored(f"{name}.weight")
            self.num_bytes += quantized_bytes(rows, width, scheme, bias, stored, self.kernels)
        elif not tied:
            self.linear([name])
        elif self.kernels.native or table != self.dtype:
            self.num_bytes += dense_bytes(rows, width, False, table, self.kernels)

    def _scheme(self, name: str) -> LinearScheme | None:
        """Scheme of a linear that is stored as codes; None = it is stored as values."""
        return stored_scheme(name, self._local.get(name, set()), self.scheme)


_COUNTED = cast(Linear, LinearFacts((0, 0), 0, "counted"))


def dense_bytes(rows: int, width: int, bias: bool, stored: torch.dtype, kernels: LinearKernels) -> int:
    """A linear (N, K) whose weight is values, of dtype `stored` in the checkpoint."""
    if not kernels.native:
        return rows * (width + bias) * kernels.dtype.itemsize
    size = 2 if torch.bfloat16 in (kernels.dtype, stored) else 4
    return padded(rows, _PANEL) * (padded(width, 2) * size + 4 * bias)


def quantized_bytes(
    rows: int, width: int, scheme: LinearScheme, bias: bool, scale_dtype: torch.dtype, kernels: LinearKernels
) -> int:
    """Codes, scales, zero points and bias of a linear (N, K).

    Args:
        rows, width: N and K.
        scheme: how it is stored.
        bias: whether it has one.
        scale_dtype: of the scales in the checkpoint.
        kernels: that run it.
    """
    if scheme.activation is not None and not scheme.activation.is_per_token:
        scheme = replace(scheme, activation=None)  # rounded before the product, not by its kernel
    groups = scheme.weight.num_groups(width)
    group, kind = width // groups, scheme.weight.dtype
    if not kernels.native:
        return _torch_bytes(rows, width, scheme, bias, kernels)
    # Native kernels read inputs in pairs; an odd group splits one between two scales, so they keep values instead.
    if groups > 1 and group % 2:
        return dense_bytes(rows, width, bias, kernels.dtype, kernels)
    integer = kind.name == "int8" and scheme.activation is not None and scheme.activation.dtype.name == "int8"
    integer = integer and (groups == 1 or group % 4 == 0)
    codes = padded(width, 4 if integer else 2) * (4 if kind.kind == "int" and kind.bits <= 4 else 8) // 8
    scales = groups * (2 if scale_dtype == torch.bfloat16 else 4)
    zeros = 0 if scheme.weight.symmetric else groups
    return padded(rows, _PANEL) * (codes + scales + zeros + 4 * bias)


def _torch_bytes(rows: int, width: int, scheme: LinearScheme, bias: bool, kernels: LinearKernels) -> int:
    """Bytes in the layout of torch's own kernels where they take the scheme, else as the values it decodes to."""
    groups = scheme.weight.num_groups(width)
    on_cpu, in_bf16 = kernels.device.type == "cpu", kernels.dtype == torch.bfloat16
    kind = scheme.weight.dtype
    inputs = None if scheme.activation is None else scheme.activation.dtype.name
    if kind.kind == "int" and kind.bits <= 4 and inputs is None:
        divides = rows % 64 == 0 and width % 32 == 0 if on_cpu else rows % 8 == 0 and width % 128 == 0
        if divides and in_bf16 and width // groups in _TORCH_GROUPS:
            return rows * (width // 2 + 4 * groups + 2 * bias)
    eights = on_cpu or (rows % 8 == 0 and width % 8 == 0)
    if kind.name == inputs == "int8" and groups == 1 and eights:
        return rows * (width + 4 + 4 * bias)
    sixteens = rows % 16 == 0 and width % 16 == 0
    if kind.name == inputs == "fp8" and groups == 1 and not on_cpu and in_bf16 and sixteens:
        return rows * (width + 4 + 2 * bias)
    return dense_bytes(rows, width, bias, kernels.dtype, kernels)


def padded(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple
