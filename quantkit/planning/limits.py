"""Limits of a device: what fits in its memory, and the least time of a step at the device's bandwidth and peak rates.

Times are lower bounds, not predictions: they assume perfect overlap, free launches, and one read of every byte.
Shapes: B sequences, L tokens.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.engine_rules.data_sheets import Device
from quantkit.models.kv_budget import kept_tokens
from quantkit.models.kv_sizes import DEFAULT_PAGE_SIZE, KVForm
from quantkit.planning import memory
from quantkit.planning.shape import ModelShape
from quantkit.runtime.config import TOKEN_BUDGET

_MAX_TOKENS = 1 << 30  # context limit for a model whose config gives none
RESERVE = 0.05
"""Share of the memory that is left to the driver, the allocator and graphs."""

STEP_TOKENS = TOKEN_BUDGET["cuda"]
"""Maximum number of tokens in one step of the bundled runtime on a GPU, including prefill chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFit:
    """Use of a device's memory.

    Args:
        weight_bytes, activation_bytes, reserve_bytes: memory used by weights and activations, and memory kept in
            reserve.
        cache_bytes: memory left for the cache; may be negative.
        fits: whether `cache_bytes` is not negative.
        largest_batch: maximum number of sequences of the given context; None = the cache is unknown.
        largest_context: longest context for the given number of sequences, up to the model's limit; None = the cache is
            unknown.
        limited_by_model: whether the model's limit is reached before memory runs out.
    """

    weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    cache_bytes: int
    fits: bool
    largest_batch: int | None
    largest_context: int | None
    limited_by_model: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Eviction:
    """Eviction settings: how many tokens of each sequence the cache keeps.

    Args:
        budget: number of tokens to keep, or a share of the context; None = keep all.
        policy: name of the eviction policy, which decides which tokens are kept.
        page_size: tokens per page of the cache.
    """

    budget: int | float | None = None
    policy: str | None = None
    page_size: int = DEFAULT_PAGE_SIZE

    def kept(self, context: int) -> int:
        """Return how many tokens of a sequence of this length are in the cache."""
        return kept_tokens(self.budget, context)

    def sequence_bytes(self, shape: ModelShape, context: int, form: KVForm) -> float:
        """Return the bytes that the bundled runtime allocates for one sequence."""
        return memory.kv_allocated_bytes(shape, self.kept(context), form, self.page_size)

    def chunk_bytes(self, shape: ModelShape, context: int, form: KVForm) -> float:
        """Return the extra cache bytes that a sequence needs while a prompt chunk is computed, before tokens are
        evicted.
        """
        kept = self.kept(context)
        most = min(context, kept - 1 + STEP_TOKENS) if kept < context else kept
        before, after = (memory.kv_allocated_bytes(shape, each, form, self.page_size) for each in (most, kept))
        return before - after


EVERYTHING = Eviction()


def device_fit(
    shape: ModelShape,
    scheme: memory.WeightChoice,
    form: KVForm,
    memory_bytes: int,
    *,
    context: int,
    batch: int,
    eviction: Eviction = EVERYTHING,
) -> DeviceFit:
    """Return how a model uses a device's memory, the largest batch, and the longest context.

    Args:
        shape: shape of the model.
        scheme: number types of the weights.
        form: form of the cache.
        memory_bytes: memory of the device.
        context: tokens per sequence, for the largest batch.
        batch: number of sequences, for the largest context.
        eviction: eviction settings; the extra memory of one prompt chunk is counted too.
    """
    weights = memory.planned_weight_bytes(shape, scheme).memory_bytes
    activations = memory.planned_activation_bytes(shape, STEP_TOKENS, batch)
    reserve = round(memory_bytes * RESERVE)
    left = memory_bytes - reserve - weights - activations
    sequences = longest = None
    limit = shape.max_length or _MAX_TOKENS
    if shape.layers:
        one = eviction.sequence_bytes(shape, context, form) + 4 * shape.vocab_size  # its logits
        beside = eviction.chunk_bytes(shape, context, form)
        # `left` already excludes the logits of `batch` sequences; here they are part of each sequence.
        sequences = max(0, int((left - beside + 4 * shape.vocab_size * batch) // one))
        longest = _longest(shape, form, left, batch, limit, eviction)
    return DeviceFit(
        weight_bytes=weights,
        activation_bytes=activations,
        reserve_bytes=reserve,
        cache_bytes=left,
        fits=left >= 0,
        largest_batch=sequences,
        largest_context=longest,
        limited_by_model=longest is not None and longest == shape.max_length,
    )


def _longest(shape: ModelShape, form: KVForm, budget: float, batch: int, limit: int, eviction: Eviction) -> int:
    """Return the longest context at which `batch` caches fit, by bisection: a cache never shrinks with length."""

    def size(tokens: int) -> float:
        beside = eviction.chunk_bytes(shape, tokens, form)
        return batch * eviction.sequence_bytes(shape, tokens, form) + beside

    return bisect_right(range(1, limit + 1), budget, key=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The least time that a step can take.

    Args:
        bytes_read: bytes of weights and cache read.
        flops: operations of products and attention.
        memory_s, compute_s: seconds for the bytes at the device's bandwidth, and for the operations at its peaks; 0 =
            bandwidth or peaks are unknown.
    """

    bytes_read: float
    flops: float
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The least time of the step: the larger of `memory_s` and `compute_s`."""
        return max(self.memory_s, self.compute_s)

    @property
    def bound_by(self) -> str:
        """Which of the two times is larger: "memory" or "compute"."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def decode_floor(
    shape: ModelShape, scheme: memory.WeightChoice, form: KVForm, device: Device, *, context: int, batch: int
) -> Floor:
    """Return the least time of one decode step, which adds one token to every sequence.

    Args:
        shape: shape of the model.
        scheme, form: number types of weights and cache.
        device: the device.
        context: number of tokens in the cache of each sequence.
        batch: number of sequences.
    """
    read = step_bytes(shape, scheme, form, context=context, batch=batch)
    products = _product_flops(shape, scheme)
    attention = batch * sum(layer.attention.decode_flops(context) for layer in shape.layers)
    head = batch * 2 * shape.head_parameters
    return _floor(device, read, {key: batch * flops for key, flops in products.items()}, head + attention)


def step_bytes(shape: ModelShape, scheme: memory.WeightChoice, form: KVForm, *, context: int, batch: int) -> float:
    """Return the bytes that a decode step reads: weights once, and the cache of every sequence."""
    weights = memory.planned_weight_bytes(shape, scheme, batch).read_bytes_per_token
    return weights + batch * memory.kv_read_bytes(shape, context, form)


def prefill_floor(shape: ModelShape, scheme: memory.WeightChoice, device: Device, *, prompt: int) -> Floor:
    """Return the least time of the prefill of one prompt; counts all products, causal attention, and one token's
    logits.

    Args:
        shape: shape of the model.
        scheme: number types of the weights.
        device: the device.
        prompt: number of prompt tokens.
    """
    products = {key: prompt * flops for key, flops in _product_flops(shape, scheme).items()}
    attention = sum(layer.attention.prefill_flops(prompt) for layer in shape.layers)
    read = memory.planned_weight_bytes(shape, scheme, prompt).read_bytes_per_token
    return _floor(device, read, products, attention + 2 * shape.head_parameters)


def _product_flops(shape: ModelShape, scheme: memory.WeightChoice) -> Mapping[str, float]:
    """Return the operations that all linears need for one token, keyed by the number type of their products."""
    if not shape.layers:
        return {"bf16": 2.0 * shape.active_parameters}
    flops: Counter[str] = Counter()
    for index, layer in enumerate(shape.layers):
        for matrix in layer.matrices:
            form = scheme.choose(index, matrix)
            flops[form.compute if form is not None else "bf16"] += 2 * matrix.active_parameters
    return flops


def _floor(device: Device, read: float, products: Mapping[str, float], in_16_bits: float) -> Floor:
    """Return the least time of a step.

    Args:
        device: the device.
        read: bytes that the step reads.
        products: operations of the linears, keyed by number type.
        in_16_bits: number of all other operations, which are computed in 16 bits.
    """
    by_type = {**products, "bf16": products.get("bf16", 0.0) + in_16_bits}
    return Floor(
        bytes_read=read,
        flops=sum(by_type.values()),
        memory_s=read / device.bandwidth if device.bandwidth else 0.0,
        compute_s=sum(flops / device.peak(key) for key, flops in by_type.items()) if device.peaks else 0.0,
    )
