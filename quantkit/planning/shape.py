"""The shape of a model: its matrices, attention layers and other parameters. Sizes only, no file names."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.models.family import Family
from quantkit.models.kv_sizes import KVForm, find_kv_form
from quantkit.models.layer_state_sizes import AttentionShape, StateShape
from quantkit.models.layer_tensors import LayerTensors

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Facts about a model that a plan needs.

    Args:
        name: name for reports.
        family: description of the model's family; None = unknown, because only a parameter count is given.
        model_type: model_type in config.json.
        counted_from: "shard headers", "config.json", "shape file" or "parameter count".
        dtype: torch name of the stored weights' dtype.
        hidden_size, vocab_size, max_length: sizes; max_length None = unknown.
        layers: one entry per layer; empty if only a parameter count is known.
        prefix: full name of the list of layers, e.g. `model.layers`.
        embedding: parameters of the token embedding.
        head: parameters of the output head; 0 if it shares the embedding.
        other: parameters outside layers, embedding and head.
        mtp: tensors of each MTP head, under full names; empty if the family does not describe its heads. The number
            of parameters and the memory do not include heads, because engines load them only for speculative decoding.
        mtp_parameters: parameters of all MTP heads, described or not.
        mtp_stored_bytes: bytes of the heads' tensors, if headers are known.
        active_total: number of parameters that one token uses, if the layers are unknown; None = computed from
            `layers`.
        stored_bytes: bytes of all tensors, if headers are known.
        quantized: whether the checkpoint is already quantized, so that `stored_bytes` is the size of its weights.
        remarks: what the count leaves out or assumes.
        cache: KV cache settings of the checkpoint; None = it has none.
        stored: function from a linear's full name to the `LinearScheme` of its codes in the checkpoint, or to None if
            the linear has no codes.
    """

    name: str
    family: Family | None = None
    model_type: str = "unknown"
    counted_from: str
    dtype: str = "bfloat16"
    hidden_size: int = 0
    vocab_size: int = 0
    max_length: int | None = None
    layers: tuple[LayerTensors, ...] = ()
    prefix: str = "model.layers"
    embedding: int = 0
    head: int = 0
    other: int = 0
    mtp: tuple[LayerTensors, ...] = ()
    mtp_parameters: int = 0
    mtp_stored_bytes: int | None = None
    active_total: int | None = None
    stored_bytes: int | None = None
    quantized: bool = False
    remarks: tuple[str, ...] = ()
    cache: KVForm | None = None
    stored: Callable[[str], Any] = lambda _: None

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one stored weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a shared embedding counts once."""
        return self.embedding + self.head + self.other + sum(layer.num_parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses: all except the experts it is not routed to."""
        if self.active_total is not None:
            return self.active_total
        idle = sum(m.num_parameters - m.active_parameters for layer in self.layers for m in layer.matrices)
        return self.num_parameters - idle

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the output head, even if it shares the embedding."""
        return self.head or self.embedding

    def caches(self, form: KVForm) -> Iterator[tuple[AttentionShape | StateShape, KVForm]]:
        """Yield the cache of each layer, and the number types in which it is stored.

        Caches of layers with a window are not quantized: they hold few tokens, and errors in them cost accuracy.
        """
        plain = find_kv_form("auto", self.dtype)
        for index, layer in enumerate(self.layers):
            kept = form.of(index)
            yield layer.attention, plain if layer.attention.kind == "window" and kept.bits < 16 else kept

    @property
    def attention_kinds(self) -> dict[str, int]:
        """Number of layers with each kind of cache, keyed by a short description of the kind, in layer order."""
        return dict(Counter(layer.attention.describe() for layer in self.layers))
