"""Llama and its nearest relatives: the same layers with other norms, biases, windows, positions or MLPs."""

from dataclasses import replace
from typing import Any

from quantkit.models.family import Biases, Family, Parts, QueryKeyNorm, Rope, Window
from quantkit.models.stored_names import GGUF_NUMBERS, GGUFNames


def _llama3(theta: float, factor: float) -> dict[str, Any]:
    """Return the RoPE entries of a model whose context was extended as that of Llama 3.1."""
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }


# Llama: the family whose names are the defaults.
LLAMA = Family(
    # The other two classes are Llama under another name.
    hf_names=("LlamaForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
    keys={"attention_bias": "qkv_bias"},
    not_native=("clip_qkv",),
    gguf=GGUFNames(name="llama", interleaved=True),
)
# Mistral: Llama with an optional sliding window; the linears are the same.
MISTRAL = replace(LLAMA, hf_names=("MistralForCausalLM",), window=Window(rule="all"), defaults={"sliding_window": 4096})
_SETS = Family().sets
_JOINT = Family(parallel=True, parts=Parts(mlp_norm=None)).sets[0]
_PARALLEL, _IN_TURN = (("use_parallel_residual", True),), (("use_parallel_residual", False),)

FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    # Ministral: Mistral where config.json may list which layers have the window.
    "ministral": replace(MISTRAL, hf_names=("MinistralForCausalLM",), window=Window(rule="listed"), gguf=None),
    # Ministral 3: Mistral whose queries grow with the logarithm of their position.
    "ministral3": replace(
        MISTRAL,
        hf_names=("Ministral3ForCausalLM",),
        rope=Rope(theta=1_000_000.0, grows=True),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        gguf=None,
    ),
    # Apertus: Llama with an xIELU MLP without a gate, norms on queries and keys, and other names for its norms.
    "apertus": Family(
        hf_names=("ApertusForCausalLM",),
        parts=Parts(
            input_norm="attention_layernorm", mlp_norm="feedforward_layernorm", up=("mlp.up_proj",), gated=False
        ),
        qk_norm=QueryKeyNorm(),
        vectors={"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,)},
        defaults={
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": _llama3(theta=12_000_000.0, factor=8.0),
        },
    ),
    # Arcee AFM: Llama with an MLP of squared ReLU without a gate.
    "arcee": Family(
        hf_names=("ArceeForCausalLM",),
        parts=Parts(up=("mlp.up_proj",), gated=False),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    # CWM: Llama with a window in three layers of four.
    "cwm": Family(
        hf_names=("CwmForCausalLM",),
        window=Window(rule="pattern", pattern=4, first=True),
        rope=Rope(theta=1_000_000.0),
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
            "rope_parameters": _llama3(theta=1_000_000.0, factor=16.0),
        },
    ),
    # Helium: Llama whose rotary embedding pairs neighbouring channels.
    "helium": Family(
        hf_names=("HeliumForCausalLM",),
        rope=Rope(theta=100_000.0, interleaved=True),
        defaults={"head_dim": 128, "rms_norm_eps": 1e-8},
    ),
    # Jais 2: layer norms, biases everywhere, an MLP of squared ReLU without a gate.
    "jais2": Family(
        hf_names=("Jais2ForCausalLM",),
        norm="layer",
        parts=Parts(up=("mlp.up_proj",), gated=False),
        defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
    ),
    # Nemotron: layer norms with an offset of one, half of each head rotated, an MLP of squared ReLU without a gate.
    "nemotron": Family(
        hf_names=("NemotronForCausalLM",),
        norm="layer",
        norm_offset=1.0,
        rope=Rope(partial=0.5),
        parts=Parts(up=("mlp.up_proj",), gated=False),
        defaults={"hidden_act": "relu2", "norm_eps": 1e-5},
    ),
    # Phi-3 and Phi-4: Llama with one projection for q, k and v and one for gate and up; long contexts by LongRoPE.
    "phi3": Family(
        hf_names=("Phi3ForCausalLM",),
        parts=Parts(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        window=Window(rule="all"),
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        gguf=GGUFNames(
            name="phi3",
            numbers={**GGUF_NUMBERS, "rope.scaling.original_context_length": "original_max_position_embeddings"},
        ),
    ),
    # Seed-OSS: Llama with biases on q, k and v.
    "seed-oss": Family(
        hf_names=("SeedOssForCausalLM",),
        biases=Biases(output="attention_out_bias"),
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    # SmolLM3: Llama without positions in every fourth layer.
    "smollm3": Family(
        hf_names=("SmolLM3ForCausalLM",),
        window=Window(rule="none", switch="use_sliding_window"),
        rope=Rope(theta=2_000_000.0, layers="listed"),
        defaults={"no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    # StarCoder2: layer norms, biases everywhere, an MLP without a gate, an optional sliding window.
    "starcoder2": Family(
        hf_names=("Starcoder2ForCausalLM",),
        parts=Parts(up=("mlp.c_fc",), gated=False, down="mlp.c_proj"),
        norm="layer",
        window=Window(rule="all"),
        defaults={
            "use_bias": True,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        biases=Biases(qkv="use_bias", output="use_bias", mlp="use_bias"),
    ),
    # StableLM: layer norms, a quarter of each head rotated; optionally, a norm per head and a parallel residual.
    "stablelm": Family(
        hf_names=("StableLmForCausalLM",),
        # With a parallel residual one norm feeds both attention and MLP.
        linear_sets=(
            replace(_SETS[0], when=_IN_TURN),
            replace(_SETS[2], when=_IN_TURN),
            replace(_JOINT, when=_PARALLEL),
            _SETS[1],
            _SETS[3],
        ),
        parts=Parts(parallel_mlp_norm=False),
        norm="layer",
        qk_norm=QueryKeyNorm(
            over="heads",
            switch="qk_layernorm",
            bias=False,
            query="self_attn.q_layernorm.norms.{head}",
            key="self_attn.k_layernorm.norms.{head}",
        ),
        parallel="use_parallel_residual",
        rope=Rope(partial=0.25),
        defaults={"qk_layernorm": False, "use_parallel_residual": False, "layer_norm_eps": 1e-5},
        biases=Biases(qkv="use_qkv_bias", output=False),
    ),
}
