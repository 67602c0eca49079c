"""The shape of a model: its matrices, its attention layers and what is left. Sizes only, no names of files."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.models.family import Family
from quantkit.models.kv_sizes import KVForm, find_kv_form
from quantkit.models.layer_state_sizes import AttentionShape, StateShape
from quantkit.models.tensors import LayerTensors

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Facts about a model that a plan needs.

    Args:
        name: for people.
        family: what is known of models of its kind; None = nothing, as only a number of parameters is given.
        model_type: of config.json.
        counted_from: "shard headers", "config.json", "shape file" or "parameter count".
        dtype: of the stored weights, by its torch name.
        hidden_size, vocab_size, max_length: sizes; max_length None = not said.
        layers: one each; empty when only a number of parameters is known.
        prefix: full name of the list of layers, `model.layers`.
        embedding: parameters of the token embedding.
        head: parameters of the output head; 0 when it is the embedding.
        other: parameters outside the layers beside these two.
        active_total: parameters per token where only their number is known; None = add the layers up.
        stored_bytes: of all tensors, where headers say so.
        quantized: the checkpoint is quantized already, so `stored_bytes` is what its weights take.
        remarks: what the count leaves out or assumes.
        cache: what the checkpoint says of its KV cache; None = nothing.
        stored: of a checkpoint that is quantized: the `LinearScheme` of a linear's codes by its full name.
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
    active_total: int | None = None
    stored_bytes: int | None = None
    quantized: bool = False
    remarks: tuple[str, ...] = ()
    cache: KVForm | None = None
    stored: Callable[[str], Any] = lambda _: None

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one weight as it is stored."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """All parameters; a shared embedding counts once."""
        return self.embedding + self.head + self.other + sum(layer.num_parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts it is not sent to."""
        if self.active_total is not None:
            return self.active_total
        idle = sum(m.num_parameters - m.active_parameters for layer in self.layers for m in layer.matrices)
        return self.num_parameters - idle

    @property
    def head_parameters(self) -> int:
        """Parameters of the output product, whether they are the embedding's or its own."""
        return self.head or self.embedding

    def caches(self, form: KVForm) -> Iterator[tuple[AttentionShape | StateShape, KVForm]]:
        """The cache of each layer, and the form that it is kept in.

        Layers with a window are not quantized: they keep few tokens, and their errors are known to cost accuracy.
        """
        plain = find_kv_form("auto", self.dtype)
        for index, layer in enumerate(self.layers):
            kept = form.of(index)
            yield layer.attention, plain if layer.attention.kind == "window" and kept.bits < 16 else kept

    @property
    def attention_kinds(self) -> dict[str, int]:
        """Number of layers by a short description of their cache, in order of appearance."""
        return dict(Counter(layer.attention.describe() for layer in self.layers))
