"""What a model family is, as data: where its layers are and which linears belong together. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSet:
    """Linears of one decoder layer that read the same tensor. Names are relative to the layer.

    Args:
        linears: in the order in which they run; a loader that fuses them needs one scheme for all.
        source: the norm or linear that produces the input and can absorb a smoothing scale; None = nothing can.
        parent: smallest module that contains the set and turns its input into the layer's next hidden state;
            its output error is what a scale search minimises.
        grouped_heads: the source's outputs are key/value heads, each repeated for several query heads.
    """

    linears: tuple[str, ...]
    source: str | None
    parent: str
    grouped_heads: bool = False


LLAMA_SETS = (
    LinearSet(
        linears=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        source="input_layernorm",
        parent="self_attn",
    ),
    LinearSet(linears=("self_attn.o_proj",), source="self_attn.v_proj", parent="self_attn.o_proj", grouped_heads=True),
    LinearSet(linears=("mlp.gate_proj", "mlp.up_proj"), source="post_attention_layernorm", parent="mlp"),
    LinearSet(linears=("mlp.down_proj",), source="mlp.up_proj", parent="mlp.down_proj"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Names of the parts of a decoder-only model in transformers. The defaults are Llama's.

    Args:
        hf_names: `architectures` entries of config.json that this describes.
        backbone: the model without its head, relative to the causal LM.
        layers: the list of decoder layers.
        embedding: token embedding.
        head: output projection; may be tied to the embedding.
        linear_sets: linears of a decoder layer, sets in the order in which they run.
    """

    hf_names: tuple[str, ...]
    backbone: str = "model"
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    linear_sets: tuple[LinearSet, ...] = LLAMA_SETS

    @property
    def linears(self) -> tuple[str, ...]:
        """All linears of a layer, relative names, in running order."""
        return tuple(name for group in self.linear_sets for name in group.linears)
