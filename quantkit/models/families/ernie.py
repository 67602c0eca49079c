"""ERNIE 4.5, dense and with experts."""

from dataclasses import replace

from quantkit.models.family import SHARED_EXPERTS, Biases, Family, Rope

# ERNIE 4.5, dense: Llama whose rotary embedding pairs neighbouring channels.
ERNIE4_5 = Family(
    hf_names=("Ernie4_5ForCausalLM",),
    biases=Biases(qkv="use_bias", output="use_bias", mlp="use_bias"),
    rope=Rope(theta=500_000.0, interleaved=True),
    defaults={"tie_word_embeddings": True, "head_dim": 128, "rms_norm_eps": 1e-5},
)

FAMILIES = {
    "ernie4-5": ERNIE4_5,
    # ERNIE 4.5 with experts, dense first layers and shared experts.
    "ernie4-5-moe": replace(
        ERNIE4_5,
        hf_names=("Ernie4_5_MoeForCausalLM",),
        experts=replace(
            SHARED_EXPERTS,
            balance="mlp.moe_statics.e_score_correction_bias",
            balance_rows=1,
            normalize=True,
            exact=True,
        ),
        keys={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
        },
        defaults={
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        stored_modules={"mlp.gate.moe_statics": "mlp.moe_statics"},
    ),
}
