"""DeepSeek-V4: compressed attention, several residual streams, experts chosen by token id in the first layers.

Shapes: D hidden width, d head width, r rank of the queries, g groups of the output projection, n residual streams.
Loaders expect some parts unquantized: the modules that make compressed entries, the indexer, the mixing of streams, and
the first output projection (one product per group of heads).
Source: transformers `models/deepseek_v4/` for names, shapes and defaults; its renaming of published checkpoints.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from quantkit.errors import ModelError
from quantkit.models.config import ConfigReader
from quantkit.models.family import SHARED_UP, Experts, Family, Rope
from quantkit.models.layer_state_sizes import AttentionShape
from quantkit.models.layer_tensors import LayerTensors, Matrix
from quantkit.models.linear_sets import LinearSet, expert_sets
from quantkit.models.stored_names import StoredNames

_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128, "sliding_attention": 0}
_NORMS = {"attn": "input_layernorm", "ffn": "post_attention_layernorm"}
_SHARED = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}
# Patterns in the names of published files, and their replacements, in the order in which they are applied.
_RENAMED = (
    (r"^(layers|embed|norm|hc_head)", r"model.\1"),
    (r"^head\.", "lm_head."),
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"^model\.hc_head_", "model.hc_head.hc_"),
    (r"\.(attn|ffn)_norm\.", lambda match: f".{_NORMS[match[1]]}."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.attn_sink$", ".sinks"),
    (r"(self_attn|compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.w([qo])_([ab])\.", r".\1_\2_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w([123])\.", lambda match: f".shared_experts.{_SHARED[match[1]]}."),
)

Sizes = list[tuple[str, int, int]]
Vectors = dict[str, tuple[int, ...]]


def published_names(names: Sequence[str]) -> StoredNames | None:
    """Return the names of the model's tensors in published files; None for files with transformers' own names."""
    if not any(re.match(r"(model\.)?layers\.\d+\.(attn|ffn)\.", name) for name in names):
        return None
    tensors = {_own_name(name): name for name in names}
    pairs = [(own.rpartition(".")[0], name.rpartition(".")[0]) for own, name in tensors.items()]
    return StoredNames(
        tensors={own: name for own, name in tensors.items() if own != name},
        modules={own: name for own, name in pairs if own != name},
    )


def _own_name(name: str) -> str:
    if name.startswith("mtp."):
        return name  # layers for multi-token prediction, which quantkit copies but never uses
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)  # type: ignore[arg-type]  # a string or a function, each fits
    return name


def compressed_block(read: ConfigReader, index: int) -> LayerTensors:
    """Return the attention of one layer, and the layer's tensors except its norms and experts."""
    attention = _attention(read, index)
    hidden, heads, width = read.count("hidden_size"), attention.num_heads, attention.key_dim
    rank, groups, out_rank = read.count("q_lora_rank"), read.count("o_groups"), read.count("o_lora_rank")
    sizes = [
        ("q_a_proj", rank, hidden),
        ("q_b_proj", heads * width, rank),
        ("kv_proj", width, hidden),
        ("o_a_proj", groups * out_rank, heads * width // groups),
        ("o_b_proj", hidden, groups * out_rank),
    ]
    vectors: Vectors = {
        "self_attn.q_a_norm.weight": (rank,),
        "self_attn.kv_norm.weight": (width,),
        "self_attn.sinks": (heads,),
    }
    if attention.ratio:
        sizes += _compressor("compressor", width, attention, hidden, vectors)
    if attention.index_dim:
        indexer, number = "compressor.indexer", attention.index_heads
        sizes += _compressor(indexer, attention.index_dim, attention, hidden, vectors)
        sizes += [(f"{indexer}.q_b_proj", number * attention.index_dim, rank)]
        sizes += [(f"{indexer}.scorer.weights_proj", number, hidden)]
    quantized = {name for group in _ATTENTION for name in group.linears}
    names = [f"self_attn.{name}" for name, _, _ in sizes]
    matrices = tuple(
        Matrix(name=name, out_features=rows, in_features=columns, quantizable=name in quantized)
        for name, (_, rows, columns) in zip(names, sizes, strict=True)
    )
    if is_hashed(read, index):
        vectors["mlp.gate.tid2eid"] = (read.count("vocab_size"), read.count("num_experts_per_tok"))
    else:  # learned routers balance the load
        vectors["mlp.gate.e_score_correction_bias"] = (read.count("num_experts"),)
    streams = read.count("hc_mult")
    rows = (2 + streams) * streams
    for mixing in ("attn_hc", "ffn_hc"):  # mixing of the residual streams
        vectors |= {f"{mixing}.fn": (rows, streams * hidden), f"{mixing}.base": (rows,), f"{mixing}.scale": (3,)}
    return LayerTensors(matrices=matrices, vectors=vectors, attention=attention)


def is_hashed(read: ConfigReader, index: int) -> bool:
    """Whether a layer's experts are chosen by token id."""
    types = read.get("mlp_layer_types")
    if isinstance(types, list) and index < len(types):
        return bool(types[index] == "hash_moe")
    return index < read.count("num_hash_layers", at_least=0)


def _attention(read: ConfigReader, index: int) -> AttentionShape:
    name, width = _layer_type(read, index), read.count("head_dim")
    rates, indexed = read.get("compress_rates"), name == "compressed_sparse_attention"
    rotated = int(width * min(1.0, read.number("partial_rotary_factor", default=64 / 512)))
    return AttentionShape(
        num_heads=read.count("num_attention_heads"),
        key_dim=width,
        rope_dim=read.count("qk_rope_head_dim", default=rotated),
        window=read.count("sliding_window"),
        ratio=ConfigReader(rates if isinstance(rates, dict) else _RATES).count(name, default=_RATES[name], at_least=0),
        index_dim=read.count("index_head_dim") if indexed else 0,
        index_heads=read.count("index_n_heads") if indexed else 0,
        top_k=read.count("index_topk") if indexed else None,
    )


def _layer_type(read: ConfigReader, index: int) -> str:
    """Return a layer's type from `layer_types`, or else from `compress_ratios`, or else by the family's rule.

    By that rule, layers 3, 5, 7, ... have ratio 4, and all other layers have ratio 128.
    """
    types, ratios = read.get("layer_types"), read.get("compress_ratios")
    by_ratio = {ratio: name for name, ratio in _RATES.items()}
    if isinstance(types, list):
        given: object = types[index] if index < len(types) else None
    elif isinstance(ratios, list):
        ratio = ratios[index] if index < len(ratios) else None
        given = by_ratio.get(ratio, ratio) if type(ratio) is int else ratio
    else:
        given = by_ratio[4 if index > 2 and index % 2 else 128]
    if not isinstance(given, str) or given not in _RATES:
        raise ModelError(
            f"{read.where}: layer {index} has type {given!r}, whose cache plan cannot count; supported types: "
            f"{', '.join(_RATES)}; give --params to plan the weights alone"
        )
    return str(given)


def _compressor(name: str, width: int, attention: AttentionShape, hidden: int, vectors: Vectors) -> Sizes:
    """Return the sizes of the two projections that compress tokens; add a bias per slot and a norm to `vectors`.

    For overlapping entries (csa), projections and biases are twice as wide.
    """
    vectors[f"self_attn.{name}.position_bias"] = (attention.ratio, attention.series * width)
    vectors[f"self_attn.{name}.kv_norm.weight"] = (width,)
    return [(f"{name}.{part}_proj", attention.series * width, hidden) for part in ("kv", "gate")]


_COMPRESSOR = "self_attn.compressor"
_INDEXER = f"{_COMPRESSOR}.indexer"
_ATTENTION = (
    LinearSet(
        linears=("self_attn.q_a_proj", "self_attn.kv_proj"),
        source="input_layernorm",
        parent="self_attn",
        beside=(
            *(f"{owner}.{part}_proj" for owner in (_COMPRESSOR, _INDEXER) for part in ("kv", "gate")),
            f"{_INDEXER}.scorer.weights_proj",
        ),
        optional=True,
    ),
    LinearSet(
        linears=("self_attn.q_b_proj", f"{_INDEXER}.q_b_proj"),
        source="self_attn.q_a_norm",
        parent="self_attn",
        optional=True,
    ),
    LinearSet(linears=("self_attn.o_b_proj",), source="self_attn.o_a_proj", parent="self_attn.o_b_proj"),
)
# Experts clamp gate and up before their product, so up cannot absorb down's scale.
_EXPERTS = Experts(
    up=("mlp.experts.{expert}.w1", "mlp.experts.{expert}.w3"),
    down="mlp.experts.{expert}.w2",
    shared_up=SHARED_UP,
    shared_down="mlp.shared_experts.down_proj",
    normalize=True,
    scoring="sqrtsoftplus",
    scale="routed_scaling_factor",
    smooth_down=False,
)
_MIXTURE = tuple(
    replace(group, source=None) if group.linears == (_EXPERTS.shared_down,) else group
    for group in expert_sets(_EXPERTS, "post_attention_layernorm")
)


FAMILY = Family(
    hf_names=("DeepseekV4ForCausalLM",),
    keys={"intermediate_size": "moe_intermediate_size"},
    experts=_EXPERTS,
    linear_sets=(*_ATTENTION, *_MIXTURE),
    activation="limited_swiglu",
    rope=Rope(
        by_layer=("compress", "main"),
        theta_key="compress_rope_theta",
        attention_factor=1.0,
        local_scaled=False,
        partial=64 / 512,
        width="qk_rope_head_dim",
        interleaved=True,
    ),
    defaults=(
        {"q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "head_dim": 512, "num_key_value_heads": 1}
        | {"sliding_window": 128, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512}
        | {"n_routed_experts": 256, "moe_intermediate_size": 2048, "num_experts_per_tok": 6, "n_shared_experts": 1}
        | {"num_hash_layers": 3, "hc_mult": 4, "routed_scaling_factor": 1.5, "compress_rope_theta": 160000.0}
    ),
    outside={
        "model.hc_head.hc_fn": ("hc_mult", "hc_mult*hidden_size"),
        "model.hc_head.hc_base": ("hc_mult",),
        "model.hc_head.hc_scale": (1,),
    },
    block=compressed_block,
    hands_on=True,
    published=published_names,
    only={"hidden_act": "silu", "scoring_func": "sqrtsoftplus"},
)
