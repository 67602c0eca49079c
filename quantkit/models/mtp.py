"""Multi-token prediction (MTP): heads that predict tokens after the next one, as data of a family. Torch-free.

Head i reads, at each position, a hidden state and the embedding of the token that follows. It normalizes both, joins
them, projects 2D channels to D, runs one decoder layer with the positions of the hidden states, and normalizes the
result. An output projection then gives the logits of the token after the following one. The first head reads the
hidden states of the model after the final norm; a further head reads the output of the head before it.

D hidden width, V vocabulary, N decoder layers.
Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); vLLM's `deepseek_mtp.py`, `glm4_moe_mtp.py`, `qwen3_5_mtp.py` and
`qwen3_next_mtp.py`, and SGLang's `deepseek_nextn.py`, for names and for the order of computations.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from quantkit.errors import ModelError
from quantkit.models.layer_tensors import LayerTensors, Matrix, layer_tensors, norm_shapes

if TYPE_CHECKING:
    from quantkit.models.config import ConfigReader
    from quantkit.models.description import ModelDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class MTP:
    """MTP heads of a family. The defaults are DeepSeek-V3's.

    `{head}` in a name stands for the head's number i, and `{layer}` for N + i. All names but `folder` are relative to
    `folder`. A head's decoder layer is like the model's last layer with attention that is not recurrent, and has
    experts if the model has any.

    Args:
        count: key of the number of heads.
        implied: number of heads if config.json lacks the key but the files have tensors in `folder`.
        folder: prefix of the names of a head's tensors; without `{head}` and `{layer}`, all heads share the folder.
        block: prefix of the names of the head's decoder layer.
        embedding_norm, hidden_norm: norms of the two inputs.
        projection: linear (D, 2D) of the joined inputs.
        hidden_first: whether the hidden state precedes the embedding in the projection's input.
        final_norm: norm after the decoder layer.
        embedding, output: a head's own token embedding and output projection, (V, D) each, which files may omit; the
            model's embedding and output projection then apply. None = a head never has its own.
        zero_first: whether the embedding at position 0 is set to zero, as in vLLM.
        chains_normed: whether a head that drafts further tokens reads its own output after the final norm, not before.
    """

    count: str = "num_nextn_predict_layers"
    implied: int = 0
    folder: str = "model.layers.{layer}."
    block: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    hidden_first: bool = False
    final_norm: str = "shared_head.norm"
    embedding: str | None = "embed_tokens"
    output: str | None = "shared_head.head"
    zero_first: bool = True
    chains_normed: bool = False

    def num_heads(self, entries: ConfigReader, names: Iterable[str] | None = None) -> int:
        """Return the number of heads, without reading a weight.

        Args:
            entries: entries of config.json.
            names: names of the checkpoint's tensors; None = trust config.json.
        Returns:
            The number in config.json, or fewer if the files lack heads, e.g. because transformers wrote them.
        Raises:
            ModelError: the number in config.json is not a whole number.
        """
        known = entries.get(self.count) is not None
        count = entries.count(self.count, at_least=0) if known else self.implied
        if names is None:
            return count if known else 0
        layers, stored = entries.count("num_hidden_layers"), tuple(names)
        for number in range(count):
            prefix = self._full(self.block, number, layers)
            if not any(name.startswith(prefix) for name in stored):
                return number
        return count

    def prefixes(self, entries: ConfigReader) -> tuple[str, ...]:
        """Return the prefixes of the names of all tensors that belong to heads, and to no other part of the model."""
        if "{" not in self.folder:
            return (self.folder,)
        layers = entries.count("num_hidden_layers")
        return tuple(self._full("", number, layers) for number in range(self.num_heads(entries)))

    @property
    def block_pattern(self) -> str:
        """Regular expression for the prefix of the names of any head's decoder layer."""
        return re.sub(r"\\{(head|layer)\\}", r"\\d+", re.escape(self.folder + self.block))

    def _full(self, name: str, number: int, layers: int) -> str:
        return (self.folder + name).format(head=number, layer=layers + number)


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPHead(MTP):
    """One MTP head of a model: the family's description with full names in the checkpoint in place of relative ones.

    Args:
        number: number of the head, from 0.
        layer: number of the model's decoder layer that has the same structure as the head's own decoder layer.
        embedding, output: see `MTP`; None if the files have no copies for this head.
    """

    number: int
    layer: int


_NAMES = ("block", "embedding_norm", "hidden_norm", "projection", "final_norm")


def mtp_heads(model: ModelDescription, names: Collection[str] | None = None) -> tuple[MTPHead, ...]:
    """Return a model's MTP heads.

    Args:
        model: description from config.json.
        names: names of the checkpoint's tensors; None = trust config.json, and assume that heads that may have their
            own embedding and output projection have them.
    Returns:
        Heads in order; empty if the model has none or the family's heads are not described.
    Raises:
        ModelError: the model has heads, but no layer with attention.
    """
    data = model.family.mtp
    if data is None:
        return ()

    def copy(name: str | None, number: int) -> str | None:
        full = None if name is None else data._full(name, number, model.num_layers)
        return full if full is None or names is None or any(one.startswith(f"{full}.") for one in names) else None

    def head(number: int) -> MTPHead:
        full = {field: data._full(getattr(data, field), number, model.num_layers) for field in _NAMES}
        copies = {field: copy(getattr(data, field), number) for field in ("embedding", "output")}
        return MTPHead(**{**asdict(data), **full, **copies}, number=number, layer=_like_layer(model))

    return tuple(map(head, range(data.num_heads(model.entries, names))))


def _like_layer(model: ModelDescription) -> int:
    """Return the number of the decoder layer that has the structure of the decoder layers of MTP heads."""
    attends = [i for i in range(model.num_layers) if not model.recurrent[i] and not model.only_mlp[i]]
    if not attends:
        raise ModelError(
            f"{model.entries.where}: the model has MTP heads but no layer with attention, which a head needs; correct "
            "layer_types"
        )
    return max(attends, key=lambda index: (model.with_experts[index], index))


def head_tensors(model: ModelDescription, head: MTPHead) -> LayerTensors:
    """Return all tensors of a head under their full names; the projection is the first matrix.

    Several heads may share tensors; a tensor that heads share is returned for each of them. Own copies of the token
    embedding and the output projection are matrices that are not quantizable.
    """
    hidden, vocabulary, inside = model.hidden_size, model.vocab_size, layer_tensors(model, head.layer)
    matrices = [
        Matrix(name=head.projection, out_features=hidden, in_features=2 * hidden),
        *(replace(matrix, name=head.block + matrix.name) for matrix in inside.matrices),
    ]
    for name in filter(None, (head.embedding, head.output)):
        matrices.append(Matrix(name=name, out_features=vocabulary, in_features=hidden, quantizable=False))
    vectors = {head.block + name: shape for name, shape in inside.vectors.items()}
    for norm in (head.embedding_norm, head.hidden_norm, head.final_norm):
        vectors |= norm_shapes(model, norm, hidden)
    return LayerTensors(matrices=tuple(matrices), vectors=vectors, attention=inside.attention)


def mtp_prefixes(model: ModelDescription) -> tuple[str, ...]:
    """Return the prefixes of the names of all tensors of MTP heads, even if the family does not describe its heads."""
    entries, family = model.entries, model.family
    if family.mtp is not None:
        return family.mtp.prefixes(entries)
    # Files of other families use these names; the heads are copied and never read.
    count, layers = entries.count("num_nextn_predict_layers", default=0, at_least=0), model.num_layers
    further = (f"{family.layers}.{number}." for number in range(layers, layers + count))
    return (*further, "mtp.") if count else ()
