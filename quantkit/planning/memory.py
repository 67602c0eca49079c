"""Bytes of a model for one choice of number types: weights, cache, activations, and memory needed for compression.

With a recipe, the recipe's format counts the bytes of the weights (`Format.linear_bytes`). Without a recipe, codes are
counted as in compressed-tensors: packed into 32-bit words along the inputs, with a scale per group in the model's dtype
and zero points packed along the outputs. Weights and cache are exact sums; activations are an estimate. The module does
not import torch.
Shapes: B sequences, L tokens of context, T tokens in one step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quantkit.compress.algorithms.base import Step, steps_bytes
from quantkit.models.kv_sizes import DEFAULT_PAGE_SIZE, KVForm
from quantkit.models.layer_tensors import LayerTensors, Matrix
from quantkit.planning.shape import ModelShape
from quantkit.quantities import fitting_group

_SHAPE_BYTES = 16  # weight_shape: two int64 beside every packed weight
_PRODUCTS = {"nvfp4": "fp4", "mxfp4": "fp4", "mxfp8": "fp8"}  # type of products, keyed by type of inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightForm:
    """Storage format of a model's linears.

    Args:
        name: for tables, e.g. `int4 g128`.
        bits: bits per code.
        group_size: inputs that share a scale; None = one scale per output channel.
        symmetric: whether there are no zero points.
        scaled: False for numbers without scales: bf16, fp32, or codes counted without their scales.
        compute: number type of the products: "bf16", or "int8", "fp8" or "fp4" if activations are quantized too.
        counted: the format's function that counts the bytes of a weight from N, K and the bytes of a scale; None = as
            described in the module's docstring.
        beside: the format's function that counts extra bytes per linear in a file, from the bytes of a scale; None = as
            described in the module's docstring.
    """

    name: str
    bits: int
    group_size: int | None = None
    symmetric: bool = True
    scaled: bool = True
    compute: str = "bf16"
    counted: Callable[[int, int, int], int] | None = None
    beside: Callable[[int], int] | None = None

    def fitted(self, in_features: int) -> "WeightForm":
        """Return the form with the group size that `quantize` falls back to if groups do not divide the inputs.

        Do not call this on a form whose bytes a format counts (`counted` is set), such as a recipe's forms: its group
        size is already final.
        """
        if self.group_size is None:
            return self
        assert self.counted is None, f"{self.name}: its format has already fixed the group size, {self.group_size}"
        return replace(self, group_size=fitting_group(self.group_size, in_features))

    def fits(self, in_features: int) -> bool:
        """Whether groups divide this many inputs."""
        return not self.scaled or self.group_size is None or in_features % self.group_size == 0

    def matrix_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """Return the bytes of codes, scales and zero points of a weight (N, K).

        Args:
            out_features, in_features: N and K.
            scale_bytes: bytes of one scale, in the model's dtype.
        """
        if self.counted is not None:
            return self.counted(out_features, in_features, scale_bytes)
        if not self.scaled:
            return out_features * in_features * self.bits // 8
        groups = 1 if self.group_size is None else math.ceil(in_features / self.group_size)
        zeros = 0 if self.symmetric else 4 * math.ceil(out_features * self.bits / 32) * groups
        words = out_features * math.ceil(in_features * self.bits / 32)
        return 4 * words + out_features * groups * scale_bytes + zeros

    def file_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """Return `matrix_bytes` plus the extra bytes in a file."""
        packed = _SHAPE_BYTES if self.scaled and self.compute == "bf16" else 0
        extra = packed if self.beside is None else self.beside(scale_bytes)
        return self.matrix_bytes(out_features, in_features, scale_bytes) + extra

    def bits_per_weight(self, scale_bytes: int = 2) -> float:
        """Return the bits per weight of a large matrix, not counting scales per channel.

        Do not call this on a form whose bytes a format counts (`counted` is set).
        """
        if not self.scaled or self.group_size is None:
            return float(self.bits)
        return self.bits + (8 * scale_bytes + (0 if self.symmetric else self.bits)) / self.group_size


FP32_WEIGHTS = WeightForm(name="fp32", bits=32, scaled=False)
BF16_WEIGHTS = WeightForm(name="bf16", bits=16, scaled=False)
FP8_WEIGHTS = WeightForm(name="fp8 channel", bits=8, compute="fp8")
INT8_WEIGHTS = WeightForm(name="int8 channel", bits=8)
INT4_WEIGHTS = WeightForm(name="int4 g128", bits=4, group_size=128)
INT3_WEIGHTS = WeightForm(name="int3 g128", bits=3, group_size=128)
INT2_WEIGHTS = WeightForm(name="int2 g64 asym", bits=2, group_size=64, symmetric=False)
COMPARED_WEIGHTS = (FP8_WEIGHTS, INT8_WEIGHTS, INT4_WEIGHTS, INT3_WEIGHTS, INT2_WEIGHTS)
UNSCALED_WEIGHTS = tuple(WeightForm(name=f"{bits} bits, no scales", bits=bits, scaled=False) for bits in (8, 4))


def from_linear(linear: Any, layout: str = "compressed-tensors") -> WeightForm:
    """Return the form of a recipe's scheme for one linear.

    Args:
        linear: a `quantkit.numerics.scheme.LinearScheme`, not imported here because that would import torch.
        layout: on-disk format of the recipe.
    """
    from quantkit.formats import REGISTRY  # imports torch, which the scheme has imported already

    weight, activation, format_ = linear.weight, linear.activation, REGISTRY.load(layout)
    return WeightForm(
        name=linear.describe(),
        bits=weight.dtype.bits,
        group_size=weight.group_size,
        symmetric=weight.symmetric,
        compute="bf16" if activation is None else _PRODUCTS.get(activation.dtype.name, activation.dtype.name),
        counted=partial(format_.linear_bytes, linear),
        beside=partial(format_.beside_bytes, linear),
    )


# Function from the index of a layer and a matrix in it to the matrix's form; None = as stored.
FormChoice = Callable[[int, Matrix], WeightForm | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightChoice:
    """A choice of number types for all weights.

    Args:
        name: name for tables.
        choose: returns the form of a matrix. None = as stored; if an already quantized model is quantized again, None
            means dequantized.
        head: form of the output head; None = as stored.
        unquantized: form of ignored matrices instead of their stored form; None = as stored.
        mtp: form of the quantizable linears in the decoder layers of MTP heads; None = as stored.
        beside: bytes on disk of the KV cache's scales.
        ends_bytes: bytes on disk of embedding and head; None = as stored.
        as_stored: whether the choice leaves all weights as stored.
    """

    name: str
    choose: FormChoice
    head: WeightForm | None = None
    unquantized: WeightForm | None = None
    mtp: WeightForm | None = None
    beside: int = 0
    ends_bytes: int | None = None
    as_stored: bool = False


def everywhere(form: WeightForm | None, head: WeightForm | None = None) -> WeightChoice:
    """Return the choice of the same form for all quantizable linears; None leaves all weights as stored.

    Args:
        form: form of the linears.
        head: form of the output head.
    """
    # A type without scales applies to norms and embedding too; a quantized type applies to linears only.
    plain = form if form is not None and not form.scaled else None
    return WeightChoice(
        name="as stored" if form is None else form.name,
        choose=lambda _, matrix: form.fitted(matrix.in_features) if form is not None and matrix.quantizable else None,
        head=head,
        unquantized=plain,
        as_stored=form is None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """Memory of a model's weights.

    Args:
        bits_per_weight: average over the quantized linears; over all weights if only their number is known.
        memory_bytes: bytes of all weights in memory.
        disk_bytes: bytes in files, including small tensors that accompany packed weights.
        read_bytes_per_token: bytes read by one decode step: no embedding rows, and only the experts that its tokens
            use.
    """

    bits_per_weight: float
    memory_bytes: int
    disk_bytes: int
    read_bytes_per_token: float


def planned_weight_bytes(shape: ModelShape, scheme: WeightChoice, batch: int = 1) -> WeightBytes:
    """Return the bytes of the weights under a scheme.

    Args:
        shape: shape of the model.
        scheme: number types of the weights.
        batch: number of sequences in a decode step; larger batches read more experts.
    """
    if not shape.layers:
        return _counted(shape, scheme)
    if shape.quantized and scheme.as_stored:
        stored = shape.stored_bytes or 0
        # A step looks up a few rows of the embedding, but if the embedding is also the head, it reads all of it.
        unread = shape.dtype_bytes * (shape.embedding if shape.head else 0)
        scale = (stored - unread) / max(1, shape.num_parameters - (shape.embedding if shape.head else 0))
        return _alike(stored, 8 * scale, _touched(shape, batch))
    size = scheme.unquantized.bits // 8 if scheme.unquantized else shape.dtype_bytes
    total = disk = quantized = codes = 0
    read = 0.0
    for index, layer in enumerate(shape.layers):
        other = layer.other_parameters * size
        total, disk, read = total + other, disk + other, read + other
        for matrix in layer.matrices:
            form = scheme.choose(index, matrix)
            here = file = size * matrix.out_features * matrix.in_features
            if form is not None:
                here = form.matrix_bytes(matrix.out_features, matrix.in_features, size)
                file = form.file_bytes(matrix.out_features, matrix.in_features, size)
                quantized, codes = quantized + here * matrix.copies, codes + matrix.num_parameters
            total, disk = total + here * matrix.copies, disk + file * matrix.copies
            read += here * experts_read(matrix, batch)
    outside, head = (shape.embedding + shape.other) * size, shape.head * size
    ends = shape.embedding * size + head if scheme.ends_bytes is None else scheme.ends_bytes
    head_read = shape.head_parameters * size
    if scheme.head is not None:
        head_read = scheme.head.matrix_bytes(shape.vocab_size, shape.hidden_size, size)
        # If the head is tied to the embedding, the quantized head is a second copy in memory; on disk nothing changes.
        total += head_read - head
    return WeightBytes(
        bits_per_weight=8 * quantized / codes if codes else 8.0 * size,
        memory_bytes=total + outside + head,
        disk_bytes=disk + ends + shape.other * size + scheme.beside + mtp_bytes(shape, scheme),
        read_bytes_per_token=read + shape.other * size + head_read,
    )


def mtp_bytes(shape: ModelShape, scheme: WeightChoice) -> int:
    """Return how many bytes the MTP heads take in the checkpoint's files if they are stored with this scheme."""
    if scheme.as_stored and shape.mtp_stored_bytes is not None:
        return shape.mtp_stored_bytes
    size, form = scheme.unquantized.bits // 8 if scheme.unquantized else shape.dtype_bytes, scheme.mtp
    # Heads may share tensors, such as the projection, but each has its own decoder layer.
    quantized = () if form is None else [m for head in shape.mtp for m in head.matrices[1:] if m.quantizable]
    saved = (
        m.copies * (size * m.out_features * m.in_features - form.file_bytes(m.out_features, m.in_features, size))
        for m in quantized
        if form is not None
    )
    return shape.mtp_parameters * size - sum(saved)


def experts_read(matrix: Matrix, batch: int) -> float:
    """Return the expected number of a matrix's copies (one per expert) that a step of `batch` sequences reads if each
    sequence chooses its experts at random.
    """
    if matrix.copies == matrix.active:
        return matrix.copies
    return float(matrix.copies * (1 - (1 - matrix.active / matrix.copies) ** batch))


def kv_bytes(shape: ModelShape, tokens: int, form: KVForm) -> float:
    """Return the bytes of the cache of one sequence of this length."""
    return sum(cache.cached_bytes(tokens, kept) for cache, kept in shape.caches(form))


def kv_allocated_bytes(shape: ModelShape, tokens: int, form: KVForm, page_size: int = DEFAULT_PAGE_SIZE) -> float:
    """Return the bytes that the bundled runtime allocates for a sequence: whole pages and the residual window."""
    return sum(cache.allocated_bytes(tokens, kept, shape.dtype_bytes, page_size) for cache, kept in shape.caches(form))


def kv_read_bytes(shape: ModelShape, tokens: int, form: KVForm) -> float:
    """Return the cache bytes that a decode step of one sequence reads."""
    return sum(cache.read_bytes(tokens, kept) for cache, kept in shape.caches(form))


def kv_bytes_per_token(shape: ModelShape, form: KVForm) -> float:
    """Return the cache bytes per token of a short context, before any window is full."""
    return sum(cache.token_bytes(kept) for cache, kept in shape.caches(form))


def offers(shape: ModelShape, form: KVForm) -> bool:
    """Whether every layer of the model can be cached in this form."""
    return all(cache.offers(kept) for cache, kept in shape.caches(form))


def planned_activation_bytes(shape: ModelShape, tokens: int, sequences: int) -> int:
    """Estimate the peak of activations in one step: the widest layer, and the logits in float32.

    Args:
        shape: shape of the model.
        tokens: T, tokens of the step.
        sequences: B, sequences whose logits are needed.
    """
    widest = max((_width(layer) for layer in shape.layers), default=0)
    size = min(4, shape.dtype_bytes)
    return tokens * (2 * shape.hidden_size + widest) * size + sequences * shape.vocab_size * 4


_LIBRARY_BYTES = 400 << 20  # observed: 390 MiB with the demo model, 430 with SmolLM2, more with larger vocabularies


def compression_bytes(
    shape: ModelShape, num_tokens: int, steps: Sequence[Step], *, hands_on: bool = False
) -> dict[str, int]:
    """Estimate the peak memory of `quantkit quantize` in bytes, keyed by purpose; see `algorithms.base.steps_bytes`.
    "libraries" is the memory that the process uses before it loads the first layer.

    Args:
        shape: shape of the model.
        num_tokens: calibration tokens; 0 = the recipe needs no data.
        steps: steps of the recipe.
        hands_on: whether layers pass on more than hidden states.
    """
    sizes = [
        [(m.out_features, m.in_features) for m in layer.matrices if m.quantizable for _ in range(m.copies)]
        for layer in shape.layers
    ]
    of_steps = steps_bytes(steps, sizes, shape.dtype_bytes, num_tokens * shape.hidden_size, hands_on=hands_on)
    return {**of_steps, "libraries": _LIBRARY_BYTES}


def _counted(shape: ModelShape, scheme: WeightChoice) -> WeightBytes:
    """Return the weight sizes of a model if only its parameter count is known: all weights have the same form."""
    form = scheme.choose(0, Matrix(name="", out_features=1, in_features=1))
    bits = form.bits_per_weight(shape.dtype_bytes) if form else 8.0 * shape.dtype_bytes
    return _alike(round(shape.num_parameters * bits / 8), bits, shape.active_parameters)


def _alike(total: int, bits: float, read: float) -> WeightBytes:
    """Return the sizes of weights that all have the same number of bits; a step reads `read` of them."""
    return WeightBytes(bits_per_weight=bits, memory_bytes=total, disk_bytes=total, read_bytes_per_token=read * bits / 8)


def _touched(shape: ModelShape, batch: int) -> float:
    """Return the number of parameters that one decode step reads."""
    inside = sum(
        layer.other_parameters + sum(m.out_features * m.in_features * experts_read(m, batch) for m in layer.matrices)
        for layer in shape.layers
    )
    return inside + shape.other + shape.head_parameters


def _width(layer: LayerTensors) -> int:
    """Return the number of activation values per token of a layer: the widest input plus all outputs, of either
    attention or MLP, whichever needs more.
    """
    widths = []
    for attention in (True, False):
        chosen = [m for m in layer.matrices if ("attn" in m.name or "attention" in m.name) == attention]
        widest_input = max((m.in_features * m.active for m in chosen), default=0)
        widths.append(widest_input + sum(m.out_features * m.active for m in chosen))
    return max(widths)
