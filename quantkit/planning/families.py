"""The matrices of a model from its config.json alone, for families whose weights are not at hand.

With shard headers nothing of this is needed: `headers` counts what is there.
Sizes: D hidden, I intermediate, H query heads, J key/value heads, d head width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from quantkit.planning._deepseek import v4_matrices
from quantkit.planning.config import Config
from quantkit.planning.shape import DTYPE_BYTES, Layer, Matrix, ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """In what the layers of a family differ from Llama's.

    Args:
        norms: vectors of D per layer.
        norm_bias: norms have a bias too.
        qk_norm: on each head, over all heads, or none.
        qkv_bias, o_bias, mlp_bias: biases; None = `attention_bias`, or `mlp_bias`, of the config.
        gated: gate, up and down; else two linears.
        fused_qkv, fused_mlp: q, k, v are one linear; gate and up are.
        tied: the head is the embedding unless the config says otherwise.
        final_norm: vectors of D behind the last layer.
        sinks: a number per query head.
        experts: where the linears of an expert are.
        expert_bias: biases in experts and router.
        head_bias: the output head has one.
        bias_key: entry of the config that turns the biases of q, k, v and o on.
        names: what linears are called that Llama calls otherwise.
        known: False for one that is counted as if it were Llama.
    """

    norms: int = 2
    norm_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    gated: bool = True
    fused_qkv: bool = False
    fused_mlp: bool = False
    tied: bool = False
    final_norm: int = 1
    sinks: bool = False
    experts: str = "mlp.experts.0"
    expert_bias: bool = False
    head_bias: bool = False
    bias_key: str = "attention_bias"
    names: Mapping[str, str] = field(default_factory=dict)
    known: bool = True


_PLAIN = Family(qkv_bias=False, o_bias=False, mlp_bias=False)
_QWEN2 = Family(qkv_bias=True, o_bias=False, mlp_bias=False)
_QWEN3 = Family(qk_norm="head", mlp_bias=False)
_OLMO2 = Family(qk_norm="full", mlp_bias=False)

FAMILIES = {
    "llama": Family(),
    "mistral": _PLAIN,
    "ministral": _PLAIN,
    "mixtral": Family(qkv_bias=False, o_bias=False, mlp_bias=False, experts="block_sparse_moe.experts.0"),
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "gemma": Family(tied=True, mlp_bias=False),
    "gemma2": Family(norms=4, tied=True, mlp_bias=False),
    "gemma3": Family(norms=4, tied=True, qk_norm="head", mlp_bias=False),
    "gemma3_text": Family(norms=4, tied=True, qk_norm="head", mlp_bias=False),
    "phi3": Family(fused_qkv=True, fused_mlp=True, qkv_bias=False, o_bias=False, mlp_bias=False),
    "olmo": Family(norms=0, final_norm=0, mlp_bias=False),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _OLMO2,
    "granite": Family(),
    "smollm3": Family(tied=True),
    "cohere": Family(norms=1, tied=True, mlp_bias=False),
    "cohere2": Family(norms=1, tied=True, mlp_bias=False),
    "starcoder2": Family(norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, tied=True),
    "stablelm": Family(norm_bias=True, bias_key="use_qkv_bias", o_bias=False, mlp_bias=False),
    "glm": Family(fused_mlp=True, o_bias=False, mlp_bias=False),
    "glm4": Family(norms=4, fused_mlp=True, o_bias=False, mlp_bias=False),
    "phi": Family(
        norms=1,
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        head_bias=True,
        names={"self_attn.o_proj": "self_attn.dense", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"},
    ),
    "gpt_neox": Family(
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        fused_qkv=True,
        names={
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "mlp.c_fc": "mlp.dense_h_to_4h",
            "mlp.c_proj": "mlp.dense_4h_to_h",
        },
    ),
    "glm4_moe": Family(o_bias=False, mlp_bias=False),
    "gpt_oss": Family(qkv_bias=True, o_bias=True, sinks=True, expert_bias=True),
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _PLAIN,
    "deepseek_v32": _PLAIN,
    "kimi_k2": _PLAIN,
    "deepseek_v4": _PLAIN,
}
_PREFIXES = {"gpt_neox": "gpt_neox.layers", "gemma3": "language_model.model.layers"}
_UNKNOWN = Family(known=False)


def from_config(config: Config, name: str, counted_from: str) -> ModelShape:
    """Count a model from its config.

    Args:
        config: of the model.
        name: for people.
        counted_from: what the config was read from.
    Raises:
        ModelError: a size is missing, or the model keeps something else than keys and values.
    """
    family = FAMILIES.get(config.family, _UNKNOWN)
    tied = config.flag("tie_word_embeddings", family.tied)
    embedding = config.size("vocab_size") * config.hidden_size
    layers = []
    for index, attention in enumerate(config.attentions()):
        if config.family == "deepseek_v4":
            matrices, other = v4_matrices(config, index, attention)
        else:
            matrices = (*_attention_matrices(config, family), *_mlp_matrices(config, family, index))
            other = _other(config, family, index, matrices)
        named = tuple(replace(matrix, name=family.names.get(matrix.name, matrix.name)) for matrix in matrices)
        layers.append(Layer(attention=attention, matrices=named, other=other))
    return ModelShape(
        name=name,
        family=config.family,
        counted_from=counted_from,
        dtype=stored_dtype(config),
        hidden_size=config.hidden_size,
        vocab_size=config.size("vocab_size"),
        max_length=max_length(config),
        layers=tuple(layers),
        prefix=_PREFIXES.get(config.family, "model.layers"),
        embedding=embedding,
        head=0 if tied else embedding,
        other=_outside(config, family),
        remarks=tuple(_remarks(config, family)),
    )


def stored_dtype(config: Config) -> str:
    """The number type that config.json names; bfloat16 where it says nothing usable."""
    found = str(config.data.get("dtype") or config.data.get("torch_dtype") or "bfloat16")
    return found if found in DTYPE_BYTES else "bfloat16"


def max_length(config: Config) -> int | None:
    """The longest context that the model was made for."""
    return config.optional("max_position_embeddings") or config.optional("n_positions")


def is_sparse(config: Config, index: int) -> bool:
    """Whether this layer has experts."""
    if not num_experts(config) or index in (config.data.get("mlp_only_layers") or ()):
        return False
    types = config.data.get("mlp_layer_types")
    if isinstance(types, list) and index < len(types):
        return types[index] not in ("dense", "mlp")
    if index < config.get("first_k_dense_replace", default=0):
        return False
    if type(config.data.get("moe_layer_freq")) is int:  # a list in some configs, whose dense layers are the first ones
        return index % config.size("moe_layer_freq") == 0
    return (index + 1) % config.size("decoder_sparse_step", default=1) == 0


def num_experts(config: Config) -> int:
    """Routed experts of a sparse layer; 0 for a dense model."""
    return config.get("n_routed_experts", "num_local_experts", "num_experts", default=0)


def _attention_matrices(config: Config, family: Family) -> Iterator[Matrix]:
    hidden = config.hidden_size
    if config.is_latent:
        yield from _latent_matrices(config, hidden)
        return
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    if family.fused_qkv:
        yield Matrix(name="self_attn.qkv_proj", out_features=queries + 2 * keys, in_features=hidden)
    else:
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield Matrix(name=f"self_attn.{name}", out_features=rows, in_features=hidden)
    yield Matrix(name="self_attn.o_proj", out_features=hidden, in_features=queries)


def _latent_matrices(config: Config, hidden: int) -> Iterator[Matrix]:
    """DeepSeek's projections: down to a latent vector, and up from it."""
    heads, rank = config.num_heads, config.size("kv_lora_rank")
    rope, plain, value = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim"), config.size("v_head_dim")
    query_rank = config.optional("q_lora_rank")
    if query_rank:
        yield Matrix(name="self_attn.q_a_proj", out_features=query_rank, in_features=hidden)
        yield Matrix(name="self_attn.q_b_proj", out_features=heads * (plain + rope), in_features=query_rank)
    else:
        yield Matrix(name="self_attn.q_proj", out_features=heads * (plain + rope), in_features=hidden)
    yield Matrix(name="self_attn.kv_a_proj_with_mqa", out_features=rank + rope, in_features=hidden)
    yield Matrix(name="self_attn.kv_b_proj", out_features=heads * (plain + value), in_features=rank)
    yield Matrix(name="self_attn.o_proj", out_features=hidden, in_features=heads * value)
    width = _index_dim(config)
    if width:
        number = config.get("index_n_heads", default=64)
        start = "self_attn.indexer"
        yield Matrix(name=f"{start}.wq_b", out_features=number * width, in_features=query_rank or hidden)
        yield Matrix(name=f"{start}.wk", out_features=width, in_features=hidden)
        yield Matrix(name=f"{start}.weights_proj", out_features=number, in_features=hidden, quantizable=False)


def _index_dim(config: Config) -> int:
    return config.get("index_head_dim", default=128 if config.family == "deepseek_v32" else 0)


def _mlp_matrices(config: Config, family: Family, index: int) -> Iterator[Matrix]:
    hidden = config.hidden_size
    if not is_sparse(config, index):
        yield from _mlp(config, family, "mlp", config.size("intermediate_size", "n_inner", default=4 * hidden))
        return
    count, active = num_experts(config), config.size("num_experts_per_tok", "num_experts_per_token")
    width = config.size("moe_intermediate_size", "intermediate_size")
    for matrix in _experts(family, hidden, width):
        name, rows, columns = matrix
        yield Matrix(name=name, out_features=rows, in_features=columns, copies=count, active=min(active, count))
    router = family.experts.partition(".")[0] + (".router" if family.expert_bias else ".gate")
    yield Matrix(name=router, out_features=count, in_features=hidden, quantizable=False)
    shared = config.get("shared_expert_intermediate_size", default=0)
    if shared:
        yield from _mlp(config, family, "mlp.shared_expert", shared)
        yield Matrix(name="mlp.shared_expert_gate", out_features=1, in_features=hidden, quantizable=False)
    several = config.get("n_shared_experts", "num_shared_experts", default=0)
    if several:
        yield from _mlp(config, family, "mlp.shared_experts", several * width)


def _mlp(config: Config, family: Family, start: str, width: int) -> Iterator[Matrix]:
    hidden = config.hidden_size
    if not family.gated:
        yield Matrix(name=f"{start}.c_fc", out_features=width, in_features=hidden)
        yield Matrix(name=f"{start}.c_proj", out_features=hidden, in_features=width)
        return
    if family.fused_mlp:
        yield Matrix(name=f"{start}.gate_up_proj", out_features=2 * width, in_features=hidden)
    else:
        yield Matrix(name=f"{start}.gate_proj", out_features=width, in_features=hidden)
        yield Matrix(name=f"{start}.up_proj", out_features=width, in_features=hidden)
    yield Matrix(name=f"{start}.down_proj", out_features=hidden, in_features=width)


def _experts(family: Family, hidden: int, width: int) -> list[tuple[str, int, int]]:
    """Name, N and K of the linears of one expert."""
    names = ("w1", "w3", "w2") if family.experts.startswith("block_sparse") else ("gate_proj", "up_proj", "down_proj")
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    return [(f"{family.experts}.{name}", *size) for name, size in zip(names, sizes, strict=True)]


def _other(config: Config, family: Family, index: int, matrices: tuple[Matrix, ...]) -> int:
    """Parameters of a layer that are no matrix: norms, biases, sinks."""
    norm = config.hidden_size * (2 if family.norm_bias else 1)
    parallel = config.family == "stablelm" and config.flag("use_parallel_residual")
    total = (1 if parallel else family.norms) * norm
    attention_bias, mlp_bias = config.flag(family.bias_key), config.flag("mlp_bias")
    qkv = attention_bias if family.qkv_bias is None else family.qkv_bias
    out = attention_bias if family.o_bias is None else family.o_bias
    mlp = mlp_bias if family.mlp_bias is None else family.mlp_bias
    for matrix in matrices:
        last = matrix.name.rpartition(".")[2]
        expert = ".experts" in matrix.name or last == "router"
        biased = family.expert_bias if expert else mlp if matrix.name.startswith("mlp.") else _biased(last, qkv, out)
        total += matrix.copies * matrix.out_features if biased else 0
    if config.is_latent:
        total += config.size("kv_lora_rank") + (config.optional("q_lora_rank") or 0) + 2 * _index_dim(config)
    if family.sinks:
        total += config.num_heads
    if config.family in ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe") and is_sparse(config, index):
        total += num_experts(config)  # the bias that balances the experts' load
    return total + _qk_norm(config, family)


def _biased(last: str, qkv: bool, out: bool) -> bool:
    if last in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        return qkv
    return out and last == "o_proj"


def _qk_norm(config: Config, family: Family) -> int:
    kind = family.qk_norm
    if config.flag("use_qk_norm") and config.family in ("glm4_moe", "cohere"):
        kind = "head" if config.family == "glm4_moe" else "full"
    if config.family == "stablelm" and config.flag("qk_layernorm"):
        kind = "full"  # one norm for each head, and none is shared
    if kind == "head":
        return 2 * config.head_dim
    return (config.num_heads + config.num_kv_heads) * config.head_dim if kind == "full" else 0


def _outside(config: Config, family: Family) -> int:
    """Parameters outside the layers beside embedding and head."""
    total = family.final_norm * config.hidden_size * (2 if family.norm_bias else 1)
    if family.head_bias:
        total += config.size("vocab_size")
    if config.family == "deepseek_v4":
        streams = config.size("hc_mult", default=4)
        total += streams * streams * config.hidden_size + streams + 1
    return total


def _remarks(config: Config, family: Family) -> Iterator[str]:
    if not family.known:
        yield f"family {config.family!r} is not known here and counted as if it were Llama; shard headers count exactly"
    if config.has_more:
        yield "the language model only: vision and audio parts are not counted"
    if config.optional("num_nextn_predict_layers"):
        yield "the layers that predict several tokens at once (MTP) are not counted"
    if "quantization_config" in config.data:
        yield "config.json says that the weights are quantized already; their bytes are counted as if they were not"
