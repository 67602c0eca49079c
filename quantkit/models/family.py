"""A model family as data: names of its modules, sets of its linears, and the computations of a layer. Torch-free.

One file in `families` holds everything that quantizing, planning, running and exporting need to know about a family. A
family and a config.json give a `ModelDescription`. Names are those of transformers; a "key" is a key of config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quantkit.models.config import ConfigReader
from quantkit.models.layer_tensors import LayerTensors
from quantkit.models.linear_sets import MLA_SETS, LinearSet, attention_sets, expand_set, expert_sets, mlp_sets
from quantkit.models.mtp import MTP
from quantkit.models.recurrent import Recurrent
from quantkit.models.stored_names import GGUFNames, StoredNames


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Names of a decoder layer's modules in a checkpoint, relative to the layer. None = the family lacks the module.

    Args:
        input_norm: norm before attention.
        attention_norm: norm of attention's output, before it is added to the residual stream.
        mlp_norm: norm before the MLP; None = the MLP reads the same input as attention (parallel residual).
        parallel_mlp_norm: whether `mlp_norm` also exists with a parallel residual.
        output_norm: norm of the MLP's output, before it is added to the residual stream.
        qkv: query, key and value projections, or one fused projection.
        qkv_by_head: whether the rows of the fused projection are q, k, v of head 0, then q, k, v of head 1, ...;
            otherwise, they are all rows of q, then all of k, then all of v.
        qkv_blocks: number of blocks of the fused projection; a block has queries, then values, then keys; 0 = none.
        gated_query: whether the rows that follow each head's query compute a gate for the head's attention output.
        output: output projection of attention.
        up: first linears of the MLP: gate and up, one fused linear (gate first), or one linear without a gate.
        gated: whether the MLP computes act(gate) * up.
        down: last linear of the MLP.
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
        over: channels that are normalized together. "head" = each head's, with one weight (D,) for all heads; "heads" =
            each head's, with a separate weight for each head; "projection" = those of all heads.
        switch: key that turns the norm on; None = always on.
        bias: whether layer norms of queries and keys have biases.
        after_rotation: whether the norm follows the rotary embedding instead of preceding it.
        query, key: module names; `{head}` stands for the number of the head if each head has its own module.
    """

    over: Literal["head", "heads", "projection"] = "head"
    switch: str | None = None
    bias: bool = True
    after_rotation: bool = False
    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Rule for which layers see only the last `sliding_window` tokens; `layer_types` overrides every rule except "all".

    Args:
        rule: which layers have a window. "all"; "listed" = all unless `layer_types` exists; "pattern" = all but every
            n-th; "upper" = from layer `max_window_layers` on; "even_lower" = every second layer before that layer;
            "none".
        switch: key that turns the rule on; None = on if `sliding_window` is set.
        pattern: n of "pattern", if config.json has no `sliding_window_pattern`.
        first: for "pattern", whether the first of each n layers has no window, instead of the last.
    """

    rule: Literal["all", "listed", "pattern", "upper", "even_lower", "none"]
    switch: str | None = None
    pattern: int = 1
    first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Defaults of a family's rotary position embedding; config.json takes precedence.

    Args:
        theta: base of the wavelengths.
        local_theta: base in layers with a window, whose wavelengths are then never scaled; None = as in other layers.
        local_scaled: whether wavelengths in layers with a window are scaled like those of other layers.
        partial: share of each head's channels that are rotated.
        width: key of the number of rotated channels per head; it overrides `partial`.
        interleaved: whether channels 2i and 2i+1 form a pair, instead of i and i + R/2 (of R rotated channels); a
            constant, or a key whose default is true.
        grows: whether queries are multiplied by 1 + `llama_4_scaling_beta` * log(1 + floor(position / original
            length)).
        fixed_alpha: whether "dynamic" scaling with an `alpha` enlarges the base independently of the length.
        layers: which layers have rotary positions. "all"; "window" = layers with a window; "local" = likewise, but all
            layers if the model has no windows; "listed" = layers with a 1 in `no_rope_layers`, or without that entry
            all but every n-th, n = `no_rope_layer_interval`; "named" = all if `position_embedding_type` is "rope".
        by_layer: keys of the RoPE entries for layers without and with a window, if each kind has its own entries.
        theta_key: key of the base in layers without a window, if both kinds of layers share their RoPE entries.
        attention_factor: default of YaRN's attention factor; None = derive it from `factor`.
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
    """Config.json keys of multipliers and other constants of the family's forward pass.

    Args:
        root_embedding: whether embeddings are multiplied by sqrt(hidden_size), rounded to the model's dtype.
        embedding, residual, logits: multipliers of embeddings, of outputs added to the residual stream, of logits.
        logits_divisor: divisor of the logits.
        attention, attention_root: the attention scale, or a number whose -1/2 power is the scale; without either, the
            scale is head_dim ** -0.5.
        attention_softcap, logits_softcap: c in c * tanh(x / c).
        clip: maximum absolute value of queries, keys and values.
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
        up, down: linears of an expert; `up` has the gate and the up projection, in this order, or up alone.
        gated: whether each expert, including the shared one, computes act(gate) * up.
        stacked_up, stacked_down: tensors that stack these linears of all experts, (E, 2I, H) and (E, H, I).
        transposed: whether the stacked tensors are (E, H, 2I) and (E, I, H) instead.
        interleaved: whether rows of gate and up alternate in `stacked_up`.
        width: key of an expert's intermediate size.
        normalize: whether the scores of the chosen experts are normalized to sum to 1; a key or a constant.
        bias: whether experts and router have biases.
        shared_up, shared_down: linears of the shared expert.
        shared_gate: linear that computes the weight of the shared expert's output.
        shared_width: key of the shared expert's intermediate size; None = `n_shared_experts` times an expert's size.
        smooth_down: whether the last linear in `up` can absorb a smoothing scale of the input of `down`.
        balance: name of the per-expert bias that balances how often experts are chosen; None = no such bias.
        balance_rows: size of an additional leading dimension of `balance` in files; 0 = none.
        scoring: function that converts router logits to scores.
        groups: how groups are scored, if experts are chosen from the `topk_group` best of `n_group` groups: by the best
            expert ("best") or by the sum of the two best scores ("two"). None = no groups.
        scale: key of the factor on the scores of the chosen experts.
        exact: whether the router computes in float32.
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
    """Which modules have biases, as constants or keys of config.json.

    This counts parameters. The files of a checkpoint may lack biases that are counted here.

    Args:
        qkv, output: whether the projections of attention have biases.
        mlp: whether all linears of the MLP have biases.
        head: whether the output head has a bias.
        norms: whether layer norms have biases; other norms never do.
    """

    qkv: str | bool = "attention_bias"
    output: str | bool = "attention_bias"
    mlp: str | bool = "mlp_bias"
    head: bool = False
    norms: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of decoder-only models: names in transformers, and computations. The defaults are Llama's.

    Args:
        hf_names: `architectures` entries of config.json that the family describes; empty = only for planning.
        model_types: `model_type` entries that the family describes, in addition to the name of its file.
        keys: the family's own names for config.json entries, keyed by common name.
        backbone: name of the model without its head, relative to the causal LM.
        layers, embedding: names of the list of decoder layers and of the token embedding.
        final_norm: name of the norm after the last layer.
        head: name of the output projection, which may be tied to the embedding.
        stored_head: name of the head in checkpoints, if it differs from `head`.
        linear_sets: sets of linears of a decoder layer, in execution order; None = derive them from `parts`.
        latent: whether the family has multi-head latent attention.
        layer_sets: sets of each layer, if discovery has found them layer by layer; they override `linear_sets`.
        stored_names: names of tensors in files, if a loader renames more than the prefix of the backbone.
        published: function from tensor names in files to `StoredNames`, or to None if files use transformers' names.
        stored_prefix: prefix of the backbone's tensors in files, if it differs from `backbone`.
        hands_on: whether layers can run only inside the model's own forward, because they exchange more than hidden
            states or read token ids.
        parts: names of a layer's modules.
        norm: kind of all norms; "bare" norms have no weights.
        norm_offset: number added to the weights of all norms.
        qk_norm: norm on queries and keys.
        parallel: whether attention and MLP read the same residual stream and both add to it; a key or a constant.
        one_half: whether each layer is either attention (or its replacement) or an MLP, with one norm.
        window, rope, multipliers, experts: see `Window`, `Rope`, `Multipliers` and `Experts`.
        biases: see `Biases`.
        recurrent: layers that keep a state instead of keys and values; None = no such layers.
        vectors: shapes of a layer's other parameters, keyed by name; a size is a number, a key, or a product of keys.
        sinks: name in `vectors` of the attention-sink logit per head; None = no sinks.
        outside: like `vectors`, for parameters outside the layers, e.g. learned positions.
        multi_query: key that is true if all heads share one key/value head.
        mlp_ratio: intermediate size of the MLP divided by the hidden size, if config.json lacks the intermediate size.
        activation: activation of the MLP, if the entry in config.json is wrong.
        defaults: values of keys that config.json may lack.
        transposed: relative names of linears that are stored as (K, N).
        stored_modules: names of a layer's modules in checkpoints, keyed by transformers' names, if these differ.
        stored_tensors: names of a layer's other tensors in checkpoints, keyed by transformers' names, if these differ.
        compressed_experts: whether transformers can load quantized experts if each is stored in its own tensors.
        decode_at_load: whether loaders must decode the linears first, because transformers accesses their weights.
        unread: prefixes of the names of tensors that checkpoints have but no part of the model reads.
        mtp: heads that predict further tokens; None = the family has none, or they are not described.
        native: whether quantkit's own layers can run the family's models; otherwise transformers runs the models.
        not_native: keys that, if true, require a computation that quantkit's own layers lack.
        gguf: names in GGUF files; None = the GGUF export does not support the family.
        block: function of config.json and a layer's number; returns attention, and all tensors but norms and experts.
        wrappers: `architectures` entries of multimodal models whose language model quantkit's own layers can run; their
            `text_config` describes it.
        only: values that config.json must have for these keys, if it has the keys. With a different value, the family
            does not describe the model, even if `hf_names` match. A null, and 0, count as absent.
        known: False for `families.UNKNOWN`, whose layers planning counts as if they were Llama's.
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
    mtp: MTP | None = None
    native: bool = True
    not_native: tuple[str, ...] = ()
    gguf: GGUFNames | None = None
    block: Callable[[ConfigReader, int], LayerTensors] | None = None
    wrappers: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    known: bool = True

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether the entries of a config.json agree with `only`."""
        return all((config.get(key) or value) == value for key, value in self.only.items())

    @property
    def sets(self) -> tuple[LinearSet, ...]:
        """All sets that layers of the family may have: `linear_sets`, or else sets derived from `parts`."""
        if self.linear_sets is not None:
            return self.linear_sets
        before, before_mlp = (None, None) if self.norm == "bare" else (self.parts.input_norm, self.parts.mlp_norm)
        joint = self.parallel is True and self.parts.mlp_norm is None
        mlp = mlp_sets(self.parts, before_mlp, joint=joint)
        if self.experts is not None:
            chosen, alone = expert_sets(self.experts, before_mlp), (replace(group, optional=True) for group in mlp)
            mlp = (*chosen[:2], *alone, *chosen[2:])  # without routed experts, the shared one may be the MLP
        mixing = MLA_SETS if self.latent else attention_sets(self.parts, before, joint=joint)
        if self.recurrent is not None:
            mixing = (*self.recurrent.sets(before), *(replace(group, optional=True) for group in mixing))
        sets = (*mixing, *(replace(group, optional=True) for group in mlp)) if self.one_half else (*mixing, *mlp)
        norms = {before, before_mlp} - {None}
        return tuple(replace(one, source_offset=self.norm_offset if one.source in norms else 0.0) for one in sets)

    def sets_of_layer(
        self, has: Callable[[str], bool], config: Mapping[str, Any] | None = None
    ) -> tuple[LinearSet, ...]:
        """Return the sets of one layer: expert sets for each expert, and optional sets only if the layer has them.

        Args:
            has: returns whether the layer has a linear or norm of this relative name.
            config: entries of config.json, for sets that apply only to some models; None = assume that all apply.
        Returns:
            Sets without `{expert}` in any name. If several sets have the same linear, only the first is included.
        """
        settings = {**self.defaults, **(config or {})}
        sets: list[LinearSet] = []
        for group in self.sets:
            if config is None or all(settings.get(key) == value for key, value in group.when):
                assigned = {name for other in sets for name in other.linears}
                sets += [one for one in expand_set(group, has) if not assigned & set(one.linears)]
        return tuple(sets)
