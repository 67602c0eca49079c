"""GPT-2, GPT-J, GPT-NeoX, Phi and similar models."""

from dataclasses import replace

from quantkit.models.family import Biases, Family, Parts, QueryKeyNorm, Rope, inside
from quantkit.models.stored_names import GGUF_NUMBERS, GGUFNames

_NUMBERS = {
    key.replace("layer_norm_rms", "layer_norm"): entry
    for key, entry in GGUF_NUMBERS.items()
    if entry != "num_key_value_heads"
}
# GPT-2: learned positions, layer norms, biases everywhere; its linears are stored transposed.
GPT2 = Family(
    hf_names=("GPT2LMHeadModel",),
    **inside("transformer", layers="h", embedding="wte", final_norm="ln_f"),
    parts=Parts(
        input_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        up=("mlp.c_fc",),
        gated=False,
        down="mlp.c_proj",
    ),
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    native=False,
    norm="layer",
    defaults={"tie_word_embeddings": True},
    biases=Biases(qkv=True, output=True, mlp=True),
    outside={"transformer.wpe.weight": ("max_position_embeddings", "hidden_size")},
    keys={"intermediate_size": "n_inner"},
    mlp_ratio=4,
    gguf=GGUFNames(name="gpt2", numbers=_NUMBERS, rotary=False),
)
# GPT-J: attention and MLP in parallel after one layer norm.
GPTJ = Family(
    hf_names=("GPTJForCausalLM",),
    **inside("transformer", layers="h", embedding="wte", final_norm="ln_f"),
    norm="layer",
    parallel=True,
    parts=Parts(
        input_norm="ln_1",
        mlp_norm=None,
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        up=("mlp.fc_in",),
        gated=False,
        down="mlp.fc_out",
    ),
    biases=Biases(qkv=False, output=False, mlp=True, head=True),
    rope=Rope(interleaved=True, width="rotary_dim"),
    keys={
        "intermediate_size": "n_inner",
        "hidden_activation": "activation_function",
        "num_key_value_heads": "n_head",  # each head has its own, whatever else config.json says
    },
    mlp_ratio=4,
    defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "rotary_dim": 64},
)

FAMILIES = {
    "gpt2": GPT2,
    # GPT-BigCode (SantaCoder, StarCoder): GPT-2 with ordinary linears and one key/value head.
    "gpt-bigcode": replace(
        GPT2,
        hf_names=("GPTBigCodeForCausalLM",),
        transposed=(),
        decode_at_load=True,
        multi_query="multi_query",
        defaults={**GPT2.defaults, "multi_query": True},
        gguf=None,
    ),
    "gptj": GPTJ,
    # CodeGen: GPT-J with one projection in four blocks (once one per device); a block has a quarter of q, v and k each.
    "codegen": replace(
        GPTJ, hf_names=("CodeGenForCausalLM",), parts=replace(GPTJ.parts, qkv=("attn.qkv_proj",), qkv_blocks=4)
    ),
    # GPT-NeoX and Pythia: layer norms, parallel residual with two norms, q, k and v interleaved head by head.
    "gpt-neox": Family(
        hf_names=("GPTNeoXForCausalLM",),
        **inside("gpt_neox", layers="layers", embedding="embed_in", final_norm="final_layer_norm"),
        stored_head="embed_out",
        parts=Parts(
            qkv=("attention.query_key_value",),
            qkv_by_head=True,
            output="attention.dense",
            up=("mlp.dense_h_to_4h",),
            gated=False,
            down="mlp.dense_4h_to_h",
        ),
        norm="layer",
        parallel="use_parallel_residual",
        rope=Rope(partial=0.25),
        defaults={"use_parallel_residual": True, "layer_norm_eps": 1e-5, "hidden_act": "gelu"},
        biases=Biases(qkv=True, output=True, mlp=True),
    ),
    # Phi-1 and Phi-2: one layer norm before attention and MLP side by side, biases everywhere, no gate.
    "phi": Family(
        hf_names=("PhiForCausalLM",),
        final_norm="model.final_layernorm",
        parts=Parts(mlp_norm=None, output="self_attn.dense", up=("mlp.fc1",), gated=False, down="mlp.fc2"),
        norm="layer",
        qk_norm=QueryKeyNorm(switch="qk_layernorm", query="self_attn.q_layernorm", key="self_attn.k_layernorm"),
        parallel=True,
        rope=Rope(partial=0.5),
        defaults={"qk_layernorm": False, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
        biases=Biases(qkv=True, output=True, mlp=True, head=True),
    ),
}
