"""Bytes and operations of one step of a loaded model, computed from its layers, not measured.

The bytes include every weight that the step reads, once; the cached keys and values that it reads; and the new keys and
values that it writes. They do not include activations, which stay in the processor's caches at these sizes, or the
embedding rows of the tokens.
Shapes: B sequences, T new tokens of all sequences together, L tokens of context per sequence.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.kernels.layouts import Layout
from quantkit.models.kv_budget import kept_tokens
from quantkit.models.kv_sizes import KVForm, form_of_schemes
from quantkit.models.layer_state_sizes import AttentionShape, StateShape
from quantkit.quantities import dtype_name
from quantkit.runtime.model.model import Model, NativeModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Bytes and operations of a model's steps.

    Args:
        read_bytes: bytes of weights that a step of one sequence reads.
        expert_bytes: bytes of experts within `read_bytes`; larger batches read more experts.
        expert_share: share of a layer's experts that each token uses; 1 without experts.
        parameters: number of weights, without the head, by which one token is multiplied.
        head_parameters, head_bytes: number of weights and bytes of the head.
        layers: cache or state of each layer, and the form in which it is kept.
        kv_budget: maximum number of tokens per sequence that the cache keeps; None = all.
        product: number type of the products, e.g. "bfloat16" or "int8".
    """

    read_bytes: int
    expert_bytes: int = 0
    expert_share: float = 1.0
    parameters: int
    head_parameters: int = 0
    head_bytes: int = 0
    layers: tuple[tuple[AttentionShape | StateShape, KVForm], ...] = ()
    kv_budget: int | None = None
    product: str

    def weight_bytes(self, tokens: int) -> int:
        """Return the bytes of weights that a step of this many tokens reads, if tokens choose experts at random."""
        # Expected share of experts that at least one token picks, divided by the share that one token picks.
        grown = (1 - (1 - self.expert_share) ** tokens) / self.expert_share
        return round(self.read_bytes + self.expert_bytes * (grown - 1))

    def kv_bytes(self, context: int) -> float:
        """Return the cache bytes that a sequence's next token reads."""
        kept = kept_tokens(self.kv_budget, context)
        return sum(layer.read_bytes(kept, form) for layer, form in self.layers)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes that one more token adds to the cache."""
        return sum(layer.token_bytes(form) for layer, form in self.layers)

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the bytes that a decode step of B sequences with L tokens each moves: weights and cache."""
        return self.weight_bytes(batch) + round(batch * (self.kv_bytes(context) + self.kv_token_bytes))

    def decode_flops(self, batch: int, context: int) -> int:
        """Return the operations of a decode step of B sequences with L tokens each."""
        kept = kept_tokens(self.kv_budget, context)
        attention = sum(layer.decode_flops(kept + 1) for layer, _ in self.layers)
        return batch * round(2 * (self.parameters + self.head_parameters) + attention)

    def prefill_bytes(self, prompt: int, budget: int) -> int:
        """Return the bytes that the prefill of a prompt moves; each chunk of `budget` tokens reads all weights."""
        starts = range(0, prompt, budget)
        weights = sum(self.weight_bytes(min(budget, prompt - start)) for start in starts)
        return weights + round(sum(self.kv_bytes(start) for start in starts) + prompt * self.kv_token_bytes)

    def prefill_flops(self, prompt: int) -> int:
        """Return the operations of the prefill of a prompt, including the logits of its last token."""
        attention = sum(layer.prefill_flops(prompt) for layer, _ in self.layers)
        return round(2 * prompt * self.parameters + 2 * self.head_parameters + attention)


def model_cost(model: Model, layouts: Sequence[Layout]) -> Cost:
    """Count the work of a model's steps.

    Args:
        model: loaded model. A model run by transformers is counted by its bytes, without attention.
        layouts: layouts of the model's KV cache.
    """
    if not isinstance(model, NativeModel):
        return Cost(
            read_bytes=model.stored_bytes,
            parameters=model.stored_bytes // model.dtype.itemsize,
            product=product_type(model),
        )
    config, experts = model.config, model.config.experts
    linears = [linear for block in model.blocks for linear in _linears(block)]
    share = 1.0 if experts is None else experts.num_chosen / experts.num_experts
    dtypes = [getattr(layout, "dtype", model.dtype) for layout in layouts]
    forms = [form_of_schemes("", [at.scheme], dtype.itemsize) for at, dtype in zip(layouts, dtypes, strict=True)]
    return Cost(
        read_bytes=model.stored_bytes,
        expert_bytes=round(sum(linear.stored_bytes * share for linear, routed in linears if routed)),
        expert_share=share,
        parameters=round(sum(_size(linear) * (share if routed else 1.0) for linear, routed in linears)),
        head_parameters=_size(model.head),
        head_bytes=model.head.stored_bytes,
        # Without the layer of an MTP head, which only drafts.
        layers=tuple((config.attention(index), form) for index, form in enumerate(forms[: config.num_layers])),
        product=product_type(model),
    )


def product_type(model: Model) -> str:
    """Return the number type of most of a model's products."""
    name = dtype_name(model.dtype)
    if not isinstance(model, NativeModel):
        return name
    described = [linear.description for block in model.blocks for linear, _ in _linears(block)]
    integer = sum("activations int8" in text for text in described)
    return "int8" if 2 * integer > len(described) else name


def linear_kinds(model: Model) -> dict[str, int]:
    """Return the number of linears, keyed by number type and kernel, most frequent first."""
    if not isinstance(model, NativeModel):
        return {}
    counts = Counter(linear.description for block in model.blocks for linear, _ in _linears(block))
    return dict(Counter({**counts, f"head {model.head.description}": 1}).most_common())


def _linears(block: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the linears of a block, and whether each belongs to an expert that only some tokens use."""
    mlp, is_mixture = block.mlp, hasattr(block.mlp, "router")
    dense = mlp.shared if is_mixture else mlp
    mixing = () if block.attention is None else block.attention.linears
    plain = [*mixing, *((dense.up, dense.down) if dense is not None else ())]
    if is_mixture:
        plain += [mlp.router, *([] if mlp.shared_gate is None else [mlp.shared_gate])]
        yield from ((linear, True) for linear in mlp.linears)
    yield from ((linear, False) for linear in plain)


def _size(linear: Any) -> int:
    return int(linear.in_features * linear.out_features)
