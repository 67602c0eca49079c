"""A model family as data: places of its layers, linears that belong together, computations of a layer.

All that quantizing, planning, running and exporting need to know of a family stands in its one file in `families`;
with a config.json it becomes a `ModelDescription`. Torch-free. Names are those of transformers; a key is an entry of
config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quantkit.models.config import ConfigReader
from quantkit.models.linear_sets import MLA_SETS, LinearSet, attention_sets, expand_set, expert_sets, mlp_sets
from quantkit.models.recurrent import Recurrent
from quantkit.models.stored_names import GGUFNames, StoredNames
from quantkit.models.tensors import LayerTensors


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
        qkv_blocks: that many times rows of the one projection are queries, values and keys, as many of each; 0 = never.
        gated_query: the query projection gives a gate behind each head's query, which opens what the head attends to.
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
    qkv_blocks: int = 0
    gated_query: bool = False
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    gated: bool = True
    down: str = "mlp.down_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryKeyNorm:
    """A norm on queries and keys.

    Args:
        over: "head": one weight (D,) for every head; "heads": each head its own; "projection": all heads together.
        switch: key that says whether there is one; None = always.
        bias: whether layer norms among these have biases.
        after_rotation: behind the rotation in place of before it.
        query, key: module names; `{head}` stands for the number of the head where each is a module of its own.
    """

    over: Literal["head", "heads", "projection"] = "head"
    switch: str | None = None
    bias: bool = True
    after_rotation: bool = False
    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Layers that attend only to the last `sliding_window` tokens. A `layer_types` entry wins, but for "all".

    Args:
        rule: "all" layers; "listed": all without `layer_types`; "pattern": all but every n-th; "upper": from layer
            `max_window_layers` on; "even_lower": every other layer below it; "none" unless `layer_types` says so.
        switch: key that turns the rule on; None = on wherever `sliding_window` is set.
        pattern: n, where config.json does not have `sliding_window_pattern`.
        first: with "pattern", the first of each n layers has none in place of the last.
    """

    rule: Literal["all", "listed", "pattern", "upper", "even_lower", "none"]
    switch: str | None = None
    pattern: int = 1
    first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embedding, where config.json does not say otherwise.

    Args:
        theta: base of the wavelengths.
        local_theta: base in layers with a window, whose wavelengths are never scaled; None = as in the others.
        local_scaled: False: wavelengths in layers with a window are never scaled.
        partial: share of each head that is rotated.
        width: key of how many channels of each head are; it wins.
        interleaved: neighbours 2i, 2i+1 are a pair; else i, i + R/2; a key, true by default, or a constant.
        grows: queries are multiplied by 1 + `llama_4_scaling_beta` * log(1 + how often the original length fits into
            their position).
        fixed_alpha: "dynamic" scaling with an `alpha` is a larger base, whatever the length.
        layers: "all" rotate; "window": only those with one; "local": the same, but all of a model without windows;
            "listed": those with a 1 in `no_rope_layers`, by default all but every n-th, n being
            `no_rope_layer_interval`; "named": all, if `position_embedding_type` is "rope".
        by_layer: what entries of layers without and with a window stand under, where each have their own.
        theta_key: key of the base in layers without a window, where their entries are not their own.
        attention_factor: of YaRN, where its entries say none; None = it follows from the factor.
    """

    theta: float = 10000.0
    local_theta: float | None = None
    local_scaled: bool = True
    partial: float = 1.0
    width: str | None = None
    interleaved: str | bool = False
    grows: bool = False
    fixed_alpha: bool = False
    layers: Literal["all", "window", "local", "listed", "named"] = "all"
    by_layer: tuple[str, str] = ("full_attention", "sliding_attention")
    theta_key: str | None = None
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """Keys of constants that the family multiplies with, and other constants of its forward pass.

    Args:
        root_embedding: embeddings are multiplied by the square root of the hidden width, rounded to the model's dtype.
        embedding, residual, logits: of the embeddings, of what joins the residual stream, of the logits.
        logits_divisor: of the logits.
        attention: of query times key; attention_root: the same to the power of -1/2; neither: head_dim to that power.
        attention_softcap, logits_softcap: c of c * tanh(x / c).
        clip: bound of the absolute value of queries, keys and values.
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
    clip: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP. `{expert}` in a name stands for an expert's number.

    Args:
        router: linear that scores the experts.
        up, down: linears of one expert, gate first.
        gated: an expert multiplies act(gate) and up; the shared one is as the others.
        stacked_up, stacked_down: the same of all experts in one tensor (E, 2I, H) and (E, H, I).
        transposed: the stacked tensors are (E, H, 2I) and (E, I, H).
        interleaved: the outputs of the stacked gate and up take turns.
        width: key of an expert's width.
        normalize: whether the chosen scores are made to sum to one; a key or a constant.
        bias: experts and router have biases.
        shared_up, shared_down, shared_gate: an expert that sees every token, and the linear that weighs it.
        shared_width: key of its width; None = as wide as `n_shared_experts` of the others.
        smooth_down: the last of its up linears can absorb a scale of down's input.
        balance: a number for each expert that evens out how often it is chosen.
        balance_rows: it is stored with a dimension of this size in front; 0 = without.
        scoring: what makes scores of router logits.
        groups: experts are chosen from the `topk_group` best of `n_group` groups, a group being as good as its best
            expert or as the sum of its best two; None = there are no groups.
        scale: key of what the scores of the chosen are multiplied with.
        exact: the router multiplies in float32.
    """

    router: str = "mlp.gate"
    up: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    down: str = "mlp.experts.{expert}.down_proj"
    gated: bool = True
    stacked_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    transposed: bool = False
    interleaved: bool = False
    width: str = "moe_intermediate_size"
    normalize: str | bool = "norm_topk_prob"
    bias: bool = False
    shared_up: tuple[str, ...] = ()
    shared_down: str | None = None
    shared_gate: str | None = None
    shared_width: str | None = None
    smooth_down: bool = True
    balance: str | None = None
    balance_rows: int = 0
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    groups: Literal["best", "two"] | None = None
    scale: str | None = None
    exact: bool = False


SHARED_UP = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
SHARED_EXPERTS = Experts(shared_up=SHARED_UP, shared_down="mlp.shared_experts.down_proj")
BALANCED_EXPERTS = replace(
    SHARED_EXPERTS,
    balance="mlp.gate.e_score_correction_bias",
    scoring="sigmoid",
    groups="two",
    scale="routed_scaling_factor",
    exact=True,
)
"""Experts of DeepSeek-V3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Biases:
    """Linears that have biases: keys of config.json, or constants. Biases are counted, not required of files.

    Args:
        qkv, output: of attention.
        mlp: of all its linears.
        head: of the output head.
        norms: of all norms; only layer norms have any.
    """

    qkv: str | bool = "attention_bias"
    output: str | bool = "attention_bias"
    mlp: str | bool = "mlp_bias"
    head: bool = False
    norms: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapper:
    """Models that hold one of a family as their language model, with encoders of images and the like beside it.

    Args:
        hf_names: `architectures` entries of their config.json, whose `text_config` is the language model's.
        backbone: where the language model is, without its head.
        beside: what names of the other tensors begin with.
    """

    hf_names: tuple[str, ...]
    backbone: str = "model.language_model"
    beside: tuple[str, ...] = ("model.visual.",)


def inside(backbone: str, **modules: str) -> dict[str, Any]:
    """Return the fields of a `Family` whose backbone and modules do not have Llama's names."""
    return {"backbone": backbone, **{field: f"{backbone}.{name}" for field, name in modules.items()}}


def _every(_config: Mapping[str, Any]) -> bool:
    """A named function, since families are sent to child processes."""
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names of the parts of a decoder-only model in transformers, and what it computes. The defaults are Llama's.

    Args:
        hf_names: `architectures` entries of config.json that this describes; none where it is only counted.
        model_types: entries `model_type` that this describes, beside the name of its file.
        keys: what the family calls entries that others call otherwise.
        backbone: the model without its head, relative to the causal LM.
        layers: the list of decoder layers.
        embedding: token embedding.
        final_norm: after the last layer.
        head: output projection; may be tied to the embedding.
        stored_head: its name in checkpoints, where that is another one.
        linear_sets: linears of a decoder layer, sets in the order in which they run; None = as the parts say.
        latent: multi-head latent attention.
        layer_sets: sets of each layer, where a model has been looked at layer by layer; they win.
        stored_names: what files call each tensor, where a loader renames more than the prefix of the backbone.
        published: names of files -> what they call the tensors, where that is not as transformers does; None = it is.
        stored_prefix: what is in front of the names of the backbone's tensors in files, where that is not its name.
        hands_on: layers hand on more than hidden states, or see token ids: they are run in the model's own order.
        parts: modules of a layer.
        norm: kind of all norms; "bare" ones have no weights.
        norm_offset: added to the weights of all norms.
        qk_norm: norm on queries and keys.
        parallel: attention and MLP read the same residual stream and are added together; a key or a constant.
        one_half: each layer is attention, or what takes its place, or an MLP, behind one norm.
        window, rope, multipliers, experts: see there.
        biases: see there.
        recurrent: layers that keep a state in place of keys and values; None = there are none.
        vectors: other parameters of each layer by name; their sizes are numbers, keys, or products of keys.
        sinks: of these, the score of nothing at all that each head adds to its others; None = there is none.
        outside: the same of parameters beside the layers, e.g. learned positions.
        multi_query: key that says that all heads share one key/value head.
        mlp_ratio: width of the MLP over the hidden width, where config.json does not have it.
        activation: of the MLP, where config.json is not to be believed.
        defaults: values of keys that config.json may lack.
        transposed: linears that are stored as (K, N), relative names.
        stored_modules: modules of a layer that checkpoints call by another name than transformers.
        stored_tensors: other tensors of a layer, by the names of transformers, that checkpoints call otherwise.
        compressed_experts: whether transformers loads experts that are stored as codes, each under its own name.
        decode_at_load: transformers computes with the weights of this family's linears itself, so that a loader must
            have decoded them before.
        unread: what names of tensors begin with that checkpoints have and no part of the model reads.
        native: whether the runtime computes the family itself; else transformers does.
        not_native: keys that, when set to something true, ask for what the runtime does not compute.
        gguf: None = the family is not written to GGUF.
        block: what data cannot say of a layer's attention and of other tensors but its norms and its experts, by number
            of the layer; None = nothing.
        wrapper: models around one of this family whose language model the runtime computes by itself.
        only: whether it describes a model of this config.json that names it.
        known: False where a config.json is counted as if it were Llama's.
    """

    hf_names: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    backbone: str = "model"
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    stored_head: str | None = None
    linear_sets: tuple[LinearSet, ...] | None = None
    latent: bool = False
    layer_sets: tuple[tuple[LinearSet, ...], ...] = ()
    stored_names: StoredNames | None = None
    published: Callable[[Sequence[str]], StoredNames | None] | None = None
    stored_prefix: str | None = None
    hands_on: bool = False
    parts: Parts = Parts()
    norm: Literal["rms", "layer", "bare"] = "rms"
    norm_offset: float = 0.0
    qk_norm: QueryKeyNorm | None = None
    parallel: str | bool = False
    one_half: bool = False
    window: Window | None = None
    rope: Rope = Rope()
    multipliers: Multipliers = Multipliers()
    experts: Experts | None = None
    biases: Biases = Biases()
    recurrent: Recurrent | None = None
    vectors: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    sinks: str | None = None
    outside: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    multi_query: str | None = None
    mlp_ratio: int | None = None
    activation: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    stored_modules: Mapping[str, str] = field(default_factory=dict)
    stored_tensors: Mapping[str, str] = field(default_factory=dict)
    compressed_experts: bool = True
    decode_at_load: bool = False
    unread: tuple[str, ...] = ()
    native: bool = True
    not_native: tuple[str, ...] = ()
    gguf: GGUFNames | None = None
    block: Callable[[ConfigReader, int], LayerTensors] | None = None
    wrapper: Wrapper | None = None
    only: Callable[[Mapping[str, Any]], bool] = _every
    known: bool = True

    @property
    def sets(self) -> tuple[LinearSet, ...]:
        """All sets that layers of the family may have: given, or those that follow from its parts."""
        if self.linear_sets is not None:
            return self.linear_sets
        absorbs = self.norm != "bare" and not self.norm_offset  # a norm's weight can take a scale
        before, before_mlp = (name if absorbs else None for name in (self.parts.input_norm, self.parts.mlp_norm))
        joint = self.parallel is True and self.parts.mlp_norm is None
        mlp = mlp_sets(self.parts, before_mlp, joint=joint)
        if self.experts is not None:
            chosen, alone = expert_sets(self.experts, before_mlp), (replace(group, optional=True) for group in mlp)
            mlp = (*chosen[:2], *alone, *chosen[2:])  # the shared expert may be the MLP of models without others
        mixing = MLA_SETS if self.latent else attention_sets(self.parts, before, joint=joint)
        if self.recurrent is not None:
            mixing = (*self.recurrent.sets(before), *(replace(group, optional=True) for group in mixing))
        return (*mixing, *(replace(group, optional=True) for group in mlp)) if self.one_half else (*mixing, *mlp)

    def sets_of_layer(
        self, has: Callable[[str], bool], config: Mapping[str, Any] | None = None
    ) -> tuple[LinearSet, ...]:
        """The sets of one layer: those of experts for each expert, optional ones only where they are.

        Args:
            has: whether the layer has a linear or norm of this relative name.
            config: entries of config.json, for sets that hold for some models only; without it all are taken to hold.
        Returns:
            sets without `{expert}` in any name; a set that is not optional is there whether the layer has it or not.
        """
        settings = {**self.defaults, **(config or {})}
        sets: list[LinearSet] = []
        for group in self.sets:
            if config is None or all(settings.get(key) == value for key, value in group.when):
                assigned = {name for other in sets for name in other.linears}
                sets += [one for one in expand_set(group, has) if not assigned & set(one.linears)]
        return tuple(sets)
