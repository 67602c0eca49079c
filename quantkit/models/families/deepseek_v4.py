"""DeepSeek-V4, counted only: compressed attention, several residual streams, experts by hash in the first layers.

D hidden, d head width, r rank of the queries, g groups of the output projection, n residual streams.
Source: transformers `models/deepseek_v4/` for names, shapes and defaults.
"""

from quantkit.errors import ModelError
from quantkit.models.attention_shape import AttentionShape
from quantkit.models.config import ConfigReader
from quantkit.models.family import SHARED_EXPERTS, Family
from quantkit.models.tensors import LayerTensors, Matrix

_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128, "sliding_attention": 0}

Sizes = list[tuple[str, int, int]]
Vectors = dict[str, tuple[int, ...]]


def compressed_block(read: ConfigReader, index: int) -> LayerTensors:
    """Attention of one layer, and its tensors but norms and experts."""
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
        sizes += [(f"{indexer}.weights_proj", number, hidden)]
    matrices = tuple(
        Matrix(name=f"self_attn.{name}", out_features=rows, in_features=columns, quantizable="weights_proj" not in name)
        for name, rows, columns in sizes
    )
    if index >= read.count("num_hash_layers", at_least=0):  # learned routers balance the load
        vectors["mlp.gate.e_score_correction_bias"] = (read.count("num_experts"),)
    streams = read.count("hc_mult")
    rows = (2 + streams) * streams
    for mixing in ("attn_hc", "ffn_hc"):  # of the residual streams, before attention and before the experts
        vectors |= {f"{mixing}.fn": (rows, streams * hidden), f"{mixing}.base": (rows,), f"{mixing}.scale": (3,)}
    return LayerTensors(matrices=matrices, vectors=vectors, attention=attention)


def _attention(read: ConfigReader, index: int) -> AttentionShape:
    name = _layer_type(read, index)
    rates, indexed = read.get("compress_rates"), name == "compressed_sparse_attention"
    return AttentionShape(
        num_heads=read.count("num_attention_heads"),
        key_dim=read.count("head_dim"),
        rope_dim=read.count("qk_rope_head_dim"),
        window=read.count("sliding_window"),
        ratio=int((rates if isinstance(rates, dict) else _RATES).get(name, _RATES[name])),
        index_dim=read.count("index_head_dim") if indexed else 0,
        index_heads=read.count("index_n_heads") if indexed else 0,
        top_k=read.count("index_topk") if indexed else None,
    )


def _layer_type(read: ConfigReader, index: int) -> str:
    """By name, by ratio, or as the family has it: two layers of 128, then 128 and 4 in turn."""
    types, ratios = read.get("layer_types"), read.get("compress_ratios")
    by_ratio = {ratio: name for name, ratio in _RATES.items()}
    if isinstance(types, list):
        given: object = types[index] if index < len(types) else None
    elif isinstance(ratios, list):
        given = by_ratio.get(ratios[index], ratios[index]) if index < len(ratios) else None
    else:
        given = by_ratio[4 if index > 2 and index % 2 else 128]
    if given not in _RATES:
        raise ModelError(
            f"{read.where}: layer type {given!r} of layer {index} is not one whose cache plan can count; "
            f"there are: {', '.join(_RATES)}; give --params for the weights alone"
        )
    return str(given)


def _compressor(name: str, width: int, attention: AttentionShape, hidden: int, vectors: Vectors) -> Sizes:
    """Two projections, a bias per slot and a norm; overlapping entries (csa) have two series."""
    series = 2 if attention.index_dim else 1
    vectors[f"self_attn.{name}.position_bias"] = (attention.ratio, series * width)
    vectors[f"self_attn.{name}.kv_norm.weight"] = (width,)
    return [(f"{name}.{part}_proj", series * width, hidden) for part in ("kv", "gate")]


FAMILY = Family(
    experts=SHARED_EXPERTS,
    linear_sets=tuple(group for group in Family(experts=SHARED_EXPERTS).sets if "experts" in group.linears[0]),
    defaults=(
        {"q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "head_dim": 512, "qk_rope_head_dim": 64}
        | {"sliding_window": 128, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512}
        | {"n_routed_experts": 256, "moe_intermediate_size": 2048, "num_experts_per_tok": 6, "n_shared_experts": 1}
        | {"num_hash_layers": 3, "hc_mult": 4}
    ),
    outside={
        "model.hc_head.hc_fn": ("hc_mult", "hc_mult", "hidden_size"),
        "model.hc_head.hc_base": ("hc_mult",),
        "model.hc_head.hc_scale": (1,),
    },
    block=compressed_block,
    native=False,
)
