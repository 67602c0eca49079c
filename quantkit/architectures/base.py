"""What a model family is, as data: where its layers are, which linears belong together, what a layer computes.

The compress side reads the module names and the linear sets, the runtime reads the rest. Torch-free. Names are those
of transformers; a key is an entry of config.json.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

EXPERT = "{expert}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSet:
    """Linears of one decoder layer that read the same tensor. Names are relative to the layer.

    Args:
        linears: in the order in which they run; a loader that fuses them needs one scheme for all.
        source: the norm or linear that produces the input and can absorb a smoothing scale; None = nothing can.
        parent: smallest module that contains the set and turns its input into the layer's next hidden state;
            its output error is what a scale search minimises.
        grouped_heads: the source's outputs are key/value heads, each repeated for several query heads.
        beside: modules with a weight (N, K) that read the same tensor and are never quantized (routers, gates); a scale
            that is folded into the source is folded into them too.
        optional: only some layers of the family, or some of its models, have these linears.

    `{expert}` in a name stands for each number of an expert that the layer has: with a source of its own for each
    expert there is one set for each, else one set of all.
    """

    linears: tuple[str, ...]
    source: str | None
    parent: str
    grouped_heads: bool = False
    beside: tuple[str, ...] = ()
    optional: bool = False

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Those of its linears that inference engines fuse, which need one scheme: of one module, or all experts."""
        together: dict[str, list[str]] = {}
        for name in self.linears:
            owner = re.sub(r"\.\d+(\.|$)", ".*\\1", name.rpartition(".")[0])
            together.setdefault(owner, []).append(name)
        return tuple(tuple(names) for names in together.values())


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

# Nothing upstream can absorb a scale: the norm adds an offset or a bias, stands elsewhere, or feeds other linears too.
UNSMOOTHED_SETS = (
    LinearSet(linears=LLAMA_SETS[0].linears, source=None, parent="self_attn"),
    LLAMA_SETS[1],
    LinearSet(linears=LLAMA_SETS[2].linears, source=None, parent="mlp"),
    LLAMA_SETS[3],
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Modules of one decoder layer as a checkpoint names them, relative to the layer. None = the family has none.

    Args:
        input_norm: before attention.
        attention_norm: after attention, before its output joins the residual stream.
        mlp_norm: before the MLP; with a parallel residual None means that the MLP reads what attention reads.
        parallel_mlp_norm: False: `mlp_norm` is only there without a parallel residual.
        output_norm: after the MLP, before its output joins the residual stream.
        qkv: query, key and value projections, or one that is all three.
        qkv_by_head: rows of the one projection are q, k, v of head 0, then of head 1, ...; else all q, all k, all v.
        output: projection of the heads back to the hidden width.
        up: what the MLP's input goes through: gate and up, one that is both (gate first), or a single one, no gate.
        gated: the MLP multiplies act(gate) and up.
        down: back to the hidden width.
    """

    input_norm: str | None = "input_layernorm"
    attention_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    parallel_mlp_norm: bool = True
    output_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_head: bool = False
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    gated: bool = True
    down: str = "mlp.down_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryKeyNorm:
    """A norm on queries and keys before the rotation.

    Args:
        over: "head": one weight (D,) for every head; "heads": each head its own; "projection": all heads together.
        switch: key that says whether there is one; None = always.
        query, key: module names; `{head}` stands for the number of the head where each is a module of its own.
    """

    over: Literal["head", "heads", "projection"] = "head"
    switch: str | None = None
    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Which layers attend only to the last `sliding_window` tokens. A `layer_types` entry wins, but for "all".

    Args:
        rule: "all" layers; "pattern": all but every n-th; "upper": from layer `max_window_layers` on;
            "even_lower": every other layer below it; "none" unless `layer_types` says so.
        switch: key that turns the rule on; None = on wherever `sliding_window` is set.
        pattern: n, where config.json does not have `sliding_window_pattern`.
    """

    rule: Literal["all", "pattern", "upper", "even_lower", "none"]
    switch: str | None = None
    pattern: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embedding, where config.json does not say otherwise.

    Args:
        theta: base of the wavelengths.
        local_theta: base in layers with a window, whose wavelengths are never scaled; None = as in the others.
        partial: share of each head that is rotated.
        interleaved: neighbours 2i, 2i+1 are a pair; else i, i + R/2.
        layers: "all" rotate; "window": only those with one; "listed": those with a 1 in `no_rope_layers`, by default
            all but every n-th, n being `no_rope_layer_interval`.
    """

    theta: float = 10000.0
    local_theta: float | None = None
    partial: float = 1.0
    interleaved: bool = False
    layers: Literal["all", "window", "listed"] = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """Keys of constants that the family multiplies with, and other constants of its forward pass.

    Args:
        root_embedding: embeddings are multiplied by the square root of the hidden width, rounded to the model's dtype.
        embedding, residual, logits: of the embeddings, of what joins the residual stream, of the logits.
        logits_divisor: of the logits.
        attention: of query times key; attention_root: the same to the power of -1/2; neither: head_dim to that power.
        attention_softcap, logits_softcap: c of c * tanh(x / c).
    """

    root_embedding: bool = False
    embedding: str | None = None
    residual: str | None = None
    logits: str | None = None
    logits_divisor: str | None = None
    attention: str | None = None
    attention_root: str | None = None
    attention_softcap: str | None = None
    logits_softcap: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP. `{expert}` in a name stands for an expert's number.

    Args:
        router: linear that scores the experts.
        up, down: linears of one expert, gate first.
        stacked_up, stacked_down: the same of all experts in one tensor (E, 2I, H) and (E, H, I).
        width: key of an expert's width.
        normalize: whether the chosen scores are made to sum to one; a key or a constant.
        shared_up, shared_down, shared_gate: an expert that sees every token, and the linear that weighs it.
        shared_width: key of its width.
    """

    router: str = "mlp.gate"
    up: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    down: str = "mlp.experts.{expert}.down_proj"
    stacked_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    width: str = "moe_intermediate_size"
    normalize: str | bool = "norm_topk_prob"
    shared_up: tuple[str, ...] = ()
    shared_down: str | None = None
    shared_gate: str | None = None
    shared_width: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Names of the parts of a decoder-only model in transformers, and what it computes. The defaults are Llama's.

    Args:
        hf_names: `architectures` entries of config.json that this describes.
        backbone: the model without its head, relative to the causal LM.
        layers: the list of decoder layers.
        embedding: token embedding.
        final_norm: after the last layer.
        head: output projection; may be tied to the embedding.
        stored_head: its name in checkpoints, where that is another one.
        linear_sets: linears of a decoder layer, sets in the order in which they run.
        not_compressible: why the compress side does not take this family; None = it does.
        parts: modules of a layer.
        norm: kind of all norms.
        norm_offset: added to the weights of all norms.
        qk_norm: norm on queries and keys.
        parallel: attention and MLP read the same residual stream and are added together; a key or a constant.
        window, rope, multipliers, experts: see there.
        activation: of the MLP, where config.json is not to be believed.
        defaults: values of keys that config.json may lack.
        not_native: keys that, when set to something true, ask for what the runtime does not compute.
    """

    hf_names: tuple[str, ...]
    backbone: str = "model"
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    stored_head: str | None = None
    linear_sets: tuple[LinearSet, ...] = LLAMA_SETS
    not_compressible: str | None = None
    parts: Parts = Parts()
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    qk_norm: QueryKeyNorm | None = None
    parallel: str | bool = False
    window: Window | None = None
    rope: Rope = Rope()
    multipliers: Multipliers = Multipliers()
    experts: Experts | None = None
    activation: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    not_native: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        """All linears that layers of the family may have, relative names, in running order."""
        return tuple(name for group in self.linear_sets for name in group.linears)

    def sets_of_layer(self, has: Callable[[str], bool]) -> tuple[LinearSet, ...]:
        """The sets of one layer: those of experts for each expert, optional ones only where they are.

        Args:
            has: whether the layer has a linear of this relative name.
        Returns:
            sets without `{expert}` in any name; a set that is not optional is there whether the layer has it or not.
        """
        return tuple(found for group in self.linear_sets for found in _sets_of_layer(group, has))


def _sets_of_layer(group: LinearSet, has: Callable[[str], bool]) -> Iterator[LinearSet]:
    templates = [name for name in group.linears if EXPERT in name]
    experts = list(itertools.takewhile(lambda e: has(at(templates[0], e)), itertools.count())) if templates else []
    if templates and group.source is not None and EXPERT in group.source:
        for expert in experts:
            yield replace(
                group,
                linears=tuple(at(name, expert) for name in group.linears),
                source=at(group.source, expert),
                parent=at(group.parent, expert),
            )
        return
    names = [at(name, e) for e in experts for name in templates]
    names += [name for name in group.linears if name not in templates and (not group.optional or has(name))]
    if names:
        yield replace(group, linears=tuple(names), beside=tuple(name for name in group.beside if has(name)))


def at(name: str, expert: int) -> str:
    """A name with the number of an expert in it."""
    return name.replace(EXPERT, str(expert))


FUSED_EXPERTS = "its experts are one 3-D tensor in transformers, not linears that can be calibrated one by one"
