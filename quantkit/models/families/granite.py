"""Granite: like Llama, with constant multipliers. Bamba: a hybrid of attention and Mamba 2 layers, like Granite 4."""

from dataclasses import replace

from quantkit.models.family import Experts, Family, Multipliers, Parts, Rope
from quantkit.models.recurrent import MAMBA, MAMBA_DEFAULTS
from quantkit.models.stored_names import GGUF_NUMBERS, GGUFNames

_EXPERTS = Experts(
    router="block_sparse_moe.router",
    up=("block_sparse_moe.experts.{expert}.gate_proj", "block_sparse_moe.experts.{expert}.up_proj"),
    down="block_sparse_moe.experts.{expert}.down_proj",
    stacked_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
    width="intermediate_size",
    normalize=True,
)
_SHARED = replace(
    _EXPERTS,
    shared_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
    shared_width="shared_intermediate_size",
)
# Granite: Llama with constants on embeddings, attention, residual stream and logits.
GRANITE = Family(
    hf_names=("GraniteForCausalLM",),
    multipliers=Multipliers(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
    defaults=dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
    ),
    gguf=GGUFNames(
        name="granite",
        interleaved=True,
        numbers={
            **GGUF_NUMBERS,
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        is_written=False,
    ),
)
# Granite with experts in place of the MLP; files store a layer's experts in two tensors.
GRANITEMOE = replace(
    GRANITE,
    hf_names=("GraniteMoeForCausalLM",),
    gguf=None,
    experts=_EXPERTS,
    compressed_experts=False,
    stored_tensors={"block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight"},
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
)
# Granite with routed experts and a shared expert.
GRANITEMOESHARED = replace(
    GRANITEMOE,
    hf_names=("GraniteMoeSharedForCausalLM",),
    experts=_SHARED,
    defaults={**GRANITEMOE.defaults, "shared_intermediate_size": 0},
)

FAMILIES = {
    "granite": GRANITE,
    "granitemoe": GRANITEMOE,
    "granitemoeshared": GRANITEMOESHARED,
    # Granite 4 hybrids: Mamba 2 in most layers, attention mostly without positions, Granite's constants.
    # The shared MLP is the only one, or there are also routed experts.
    "granitemoehybrid": replace(
        GRANITEMOESHARED,
        hf_names=("GraniteMoeHybridForCausalLM",),
        keys={"intermediate_size": "shared_intermediate_size", "moe_intermediate_size": "intermediate_size"},
        parts=Parts(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
        experts=replace(_SHARED, width="moe_intermediate_size"),
        recurrent=MAMBA,
        rope=Rope(layers="named"),
        defaults={**GRANITEMOESHARED.defaults, **MAMBA_DEFAULTS, "shared_intermediate_size": 1024},
    ),
    # HyperCLOVA X: Granite with norms after attention and MLP, and logits multiplied by `logits_scaling`, not divided.
    "hyperclovax": replace(
        GRANITE,
        hf_names=("HyperCLOVAXForCausalLM",),
        gguf=None,
        parts=Parts(attention_norm="post_norm1", output_norm="post_norm2"),
        multipliers=replace(GRANITE.multipliers, logits="logits_scaling", logits_divisor=None),
        defaults=dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    ),
    # Bamba: Mamba 2 in most layers; in those that config.json lists, attention with half of each head rotated.
    "bamba": Family(
        hf_names=("BambaForCausalLM",),
        final_norm="model.final_layernorm",
        parts=Parts(
            mlp_norm="pre_ff_layernorm",
            up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
        ),
        recurrent=MAMBA,
        rope=Rope(partial=0.5),
        defaults={**MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    ),
}
