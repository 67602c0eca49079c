"""Apertus: Llama with an MLP of xIELU without a gate, norms on queries and keys, and names of its own for its norms."""

from quantkit.models.family import Family, Parts, QueryKeyNorm

FAMILY = Family(
    hf_names=("ApertusForCausalLM",),
    parts=Parts(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm", up=("mlp.up_proj",), gated=False),
    qk_norm=QueryKeyNorm(),
    vectors={"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,)},
    defaults={
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
)
