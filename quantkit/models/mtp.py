"""Multi-token prediction (MTP): heads that predict tokens after the next one, as data of a family. Torch-free.

At each position, a head reads a hidden state and the embedding of the next token. It normalizes both, joins them,
projects 2D channels to D, runs one decoder layer with the positions of the hidden states, and normalizes the result.
An output projection then gives the logits of the token after the next one. Head 0 reads the hidden states of the model
after its final norm; every later head reads the output of the head before it.

D hidden width, V vocabulary, N decoder layers.
Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); vLLM's `deepseek_mtp.py`, `glm4_moe_mtp.py`, `qwen3_5_mtp.py` and
`qwen3_next_mtp.py`, and SGLang's `deepseek_nextn.py`, for names and for the order of computations.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.errors import ModelError
from quantkit.models.layer_tensors import LayerTensors, Matrix, layer_tensors, norm_shapes

if TYPE_CHECKING:
    from quantkit.models.config import ConfigReader
    from quantkit.models.description import ModelDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class MTP:
    """MTP heads of a family. The defaults are DeepSeek-V3's.

    `{head}` in a name stands for the head's number i, counted from 0, and `{layer}` for N + i. All names except
    `folder` are relative to `folder`. A head's decoder layer has the structure of the model's last layer with attention
    and experts, or of its last layer with attention if no such layer has experts.

    Args:
        count: config.json key of the number of heads.
        implied: number of heads if config.json lacks this key but the files have tensors in `folder`.
        folder: prefix of the names of a head's tensors; without `{head}` and `{layer}`, all heads share the folder.
        block: prefix of the names of the head's decoder layer.
        embedding_norm, hidden_norm: norms of the two inputs.
        projection: linear (D, 2D) of the joined inputs.
        hidden_first: whether the hidden state precedes the embedding in the projection's input.
        final_norm: norm after the decoder layer.
        embedding, output: a head's own token embedding and output projection, (V, D) each. If the files omit them, the
            head uses the model's. None = no head of the family has its own.
        zero_first: whether the embedding at position 0 is set to zero, as in vLLM.
        chains_normed: whether a head that drafts several tokens in a row reads its previous output after `final_norm`;
            otherwise before it.
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
            The number in config.json, or less if the files lack some heads, e.g. because transformers wrote the files.
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
        """Return the prefixes of the names of the heads' tensors; no other tensor's name begins with one of them."""
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
class MTPHead:
    """One MTP head of one model. All names are full names in the checkpoint.

    Args:
        layer: number of the model's decoder layer that has the same structure as the head's decoder layer.
        block: prefix of the names of the head's decoder layer.
        embedding_norm, hidden_norm: norms of the two inputs.
        projection: linear (D, 2D) of the joined inputs.
        final_norm: norm after the decoder layer.
        embedding, output: the head's own token embedding and output projection; None = the files have none, so the
            model's apply.
        hidden_first, zero_first, chains_normed: see `MTP`.
    """

    layer: int
    block: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding: str | None
    output: str | None
    hidden_first: bool
    zero_first: bool
    chains_normed: bool


def mtp_heads(model: ModelDescription, names: Collection[str] | None = None) -> tuple[MTPHead, ...]:
    """Return a model's MTP heads.

    Args:
        model: description from config.json.
        names: names of the checkpoint's tensors; None = trust config.json, and assume that the files have every
            embedding and output projection that a head may have.
    Returns:
        Heads in order; empty if the model has no heads or its family does not describe them.
    Raises:
        ModelError: the model has heads, but no layer with attention.
    """
    data = model.family.mtp
    if data is None:
        return ()

    def full(name: str, number: int) -> str:
        return data._full(name, number, model.num_layers)

    def copy(name: str | None, number: int) -> str | None:
        own = None if name is None else full(name, number)
        return own if own is None or names is None or any(one.startswith(f"{own}.") for one in names) else None

    def head(number: int) -> MTPHead:
        return MTPHead(
            layer=_like_layer(model),
            block=full(data.block, number),
            embedding_norm=full(data.embedding_norm, number),
            hidden_norm=full(data.hidden_norm, number),
            projection=full(data.projection, number),
            final_norm=full(data.final_norm, number),
            embedding=copy(data.embedding, number),
            output=copy(data.output, number),
            hidden_first=data.hidden_first,
            zero_first=data.zero_first,
            chains_normed=data.chains_normed,
        )

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

    A tensor that several heads share is returned for each of them. The head's own token embedding and output
    projection, if any, are matrices that are not quantizable.
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
    """Return the prefixes of the names of all MTP heads' tensors, even if the family does not describe its heads."""
    entries, family = model.entries, model.family
    if family.mtp is not None:
        return family.mtp.prefixes(entries)
    # Files of families that describe no heads use these names; quantkit copies the heads and never reads them.
    count, layers = entries.count("num_nextn_predict_layers", default=0, at_least=0), model.num_layers
    further = (f"{family.layers}.{number}." for number in range(layers, layers + count))
    return (*further, "mtp.") if count else ()
