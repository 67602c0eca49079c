"""The matrices of a DeepSeek-V4 layer, whose attention and residual streams are unlike all others.

D hidden, d head width, r rank of the queries, g groups of the output projection, n residual streams.
Source: transformers `models/deepseek_v4/configuration_deepseek_v4.py` for names and defaults.
"""

from __future__ import annotations

from quantkit.planning.attention import Attention
from quantkit.planning.config import Config
from quantkit.planning.shape import Matrix


def v4_matrices(config: Config, index: int, attention: Attention) -> tuple[tuple[Matrix, ...], int]:
    """Matrices of one layer, and the number of its other parameters.

    Args:
        config: of the model.
        index: of the layer.
        attention: of the layer.
    Raises:
        ModelError: a size is missing.
    """
    hidden, heads, width = config.hidden_size, config.num_heads, attention.key_dim
    rank, groups = config.size("q_lora_rank", default=1024), config.size("o_groups", default=8)
    out_rank = config.size("o_lora_rank", default=1024)
    sizes = [
        ("q_a_proj", rank, hidden),
        ("q_b_proj", heads * width, rank),
        ("kv_proj", width, hidden),
        ("o_a_proj", groups * out_rank, heads * width // groups),
        ("o_b_proj", hidden, groups * out_rank),
    ]
    other = 2 * hidden + rank + width + heads  # norms, sinks
    if attention.ratio:
        added, more = _compressor("compressor", width, attention, hidden)
        sizes += added
        other += more
    if attention.index_dim:
        added, more = _compressor("compressor.indexer", attention.index_dim, attention, hidden)
        number = attention.index_heads
        sizes += [*added, ("compressor.indexer.q_b_proj", number * attention.index_dim, rank)]
        sizes += [("compressor.indexer.weights_proj", number, hidden)]
        other += more
    matrices = [
        Matrix(name=f"self_attn.{name}", out_features=rows, in_features=columns, quantizable="weights_proj" not in name)
        for name, rows, columns in sizes
    ]
    experts, balance = _experts(config, index, hidden)
    return (*matrices, *experts), other + balance + _streams(config, hidden)


def _compressor(name: str, width: int, attention: Attention, hidden: int) -> tuple[list[tuple[str, int, int]], int]:
    """Two projections, a bias per slot and a norm; overlapping entries (csa) have two series."""
    series = 2 if attention.index_dim else 1
    sizes = [(f"{name}.{part}_proj", series * width, hidden) for part in ("kv", "gate")]
    return sizes, attention.ratio * series * width + width


def _experts(config: Config, index: int, hidden: int) -> tuple[list[Matrix], int]:
    count, width = config.size("n_routed_experts", default=256), config.size("moe_intermediate_size", default=2048)
    active, shared = config.size("num_experts_per_tok", default=6), config.get("n_shared_experts", default=1)
    parts = (("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width))
    found = [
        Matrix(name=f"mlp.experts.0.{name}", out_features=rows, in_features=columns, copies=count, active=active)
        for name, rows, columns in parts
    ]
    if shared:
        found += [
            Matrix(name=f"mlp.shared_experts.{name}", out_features=rows, in_features=columns)
            for name, rows, columns in parts
        ]
    found.append(Matrix(name="mlp.gate", out_features=count, in_features=hidden, quantizable=False))
    hashed = index < config.get("num_hash_layers", default=3)
    return found, 0 if hashed else count  # learned routers have a bias that balances the load


def _streams(config: Config, hidden: int) -> int:
    """The mixing of residual streams, once before attention and once before the experts."""
    streams = config.size("hc_mult", default=4)
    rows = (2 + streams) * streams
    return 2 * (rows * streams * hidden + rows + 3)
