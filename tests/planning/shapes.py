"""Sizes of well-known models, as their config.json on the Hugging Face hub gives them, cut to what counts."""

from __future__ import annotations

from quantkit.planning.counting import from_config
from quantkit.planning.shape import ModelShape
from quantkit.planning.source import description_of


def llama(hidden, layers, heads, kv_heads, intermediate, vocab, length=2048, **others):
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        **others,
    }


DEEPSEEK_V3 = {
    **llama(7168, 61, 128, 128, 18432, 129280, 163840),
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEEPSEEK_V2 = {
    **DEEPSEEK_V3,
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
}


def deepseek_v4(hidden, layers, heads, experts, rank, top_k, groups, width, ratios):
    return {
        "model_type": "deepseek_v4",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": rank,
        "o_groups": groups,
        "o_lora_rank": 1024,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": width,
        "index_topk": top_k,
        "vocab_size": 129280,
        "max_position_embeddings": 1048576,
        "compress_ratios": ratios,
    }


MODELS = {
    "llama-1-7b": llama(4096, 32, 32, 32, 11008, 32000),
    "llama-1-13b": llama(5120, 40, 40, 40, 13824, 32000),
    "llama-2-70b": llama(8192, 80, 64, 8, 28672, 32000, 4096),
    "llama-3.1-8b": llama(4096, 32, 32, 8, 14336, 128256, 131072),
    "llama-3.1-405b": llama(16384, 126, 128, 8, 53248, 128256, 131072),
    "qwen2.5-72b": {**llama(8192, 80, 64, 8, 29568, 152064, 131072), "model_type": "qwen2"},
    "qwen3-0.6b": {
        **llama(1024, 28, 16, 8, 3072, 151936, 40960, head_dim=128, tie_word_embeddings=True),
        "model_type": "qwen3",
    },
    "qwen3-30b-a3b": {
        **llama(2048, 48, 32, 4, 6144, 151936, 40960, head_dim=128),
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral-8x7b": {
        **llama(4096, 32, 32, 8, 14336, 32000, 32768, sliding_window=None),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt-oss-20b": {
        **llama(2880, 24, 64, 8, 2880, 201088, 131072, head_dim=64, sliding_window=128),
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": {
            **llama(5376, 62, 32, 16, 21504, 262208, 131072, head_dim=128, sliding_window=1024),
            "model_type": "gemma3_text",
        },
    },
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": {
        **DEEPSEEK_V3,
        "model_type": "deepseek_v32",
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
    },
    "deepseek-v4-flash": deepseek_v4(4096, 43, 64, 256, 1024, 512, 8, 2048, [0, 0] + [4, 128] * 20 + [4, 0]),
    # 30 layers of ratio 4 and 31 of ratio 128; the last number is that of a layer which drafts.
    "deepseek-v4-pro": deepseek_v4(7168, 61, 128, 384, 1536, 1024, 16, 3072, [128, 128] + [4, 128] * 29 + [4, 0]),
}


def shape_of(name: str) -> ModelShape:
    """The shape of a model of MODELS."""
    return from_config(description_of(MODELS[name], name), name, "config.json")
