"""config.json as users have it: older names, missing defaults, and contradictions that are refused in one line."""

from __future__ import annotations

import pytest

from quantkit.errors import ModelError
from quantkit.models.config import NotNative
from quantkit.models.families import find
from quantkit.runtime.model.config import read_config
from tests.helpers import EXPERT_FAMILIES, FAMILIES, MORE_FAMILIES, tiny_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def read(changes=(), **others):
    config = {key: value for key, value in {**LLAMA, **dict(changes), **others}.items() if value != "absent"}
    return read_config(config, find(config))


def test_a_bare_config_of_the_first_llama_gets_its_defaults():
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.activation) == (4, 16, 1e-6, "silu")
    assert config.attention_scale == 0.25
    assert not config.tied
    assert config.ropes[0].theta == 10000.0
    assert config.windows[0] is None
    assert config.experts is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "dtype": "bfloat16"},
        ),
        (
            {"architectures": ["StableLmForCausalLM"], "partial_rotary_factor": 0.5},
            {
                "architectures": ["StableLmForCausalLM"],
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
            },
        ),
        (
            {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5, "rotary_emb_base": 20000},
            {
                "architectures": ["GPTNeoXForCausalLM"],
                "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 20000},
            },
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_theta": 1e6,
                "rope_local_base_freq": 20000,
                "sliding_window_pattern": 2,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "architectures": ["Gemma3ForCausalLM"],
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 20000},
                },
            },
        ),
    ],
)
def test_old_and_new_names_mean_the_same(old, new):
    assert read(old) == read(new)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES])
def test_defaults_are_those_of_transformers(family):
    """A config.json without the keys that have defaults reads like the full one that transformers writes."""
    from transformers import AutoConfig

    sizes = {key: value for key, value in LLAMA.items() if key != "architectures"}
    sizes |= {"num_key_value_heads": 4} if family != "llama" else {}
    shared = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    needed = {
        **dict.fromkeys(("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"), shared),
        "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "deepseek_v2": ("num_experts_per_tok",),
        "olmoe": ("num_experts", "num_experts_per_tok"),
        "nemotron_h": ("layers_block_type",),
        "deepseek_v4": ("moe_intermediate_size",),
    }.get(family, ())
    sizes |= {key: getattr(tiny_config(family), key) for key in needed}
    if family == "nemotron_h":
        del sizes["num_hidden_layers"]  # as many as are listed
    if family in ("glm", "glm4", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"):
        sizes["head_dim"] = 16
    if family in ("codegen", "gptj"):
        sizes["rotary_dim"] = 16  # by default more than these heads are wide
    full = AutoConfig.for_model(family, **sizes)
    name = next(n for n in _names(family) if n)
    actual = read_config({"architectures": [name], **sizes}, find({"architectures": [name]}))
    expected = full.to_dict()
    if family == "gemma":
        expected["hidden_act"] = "gelu_pytorch_tanh"
    expected_config = read_config({**expected, "architectures": [name]}, find({"architectures": [name]}))
    assert actual == expected_config


def _names(family):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    yield MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]


def test_null_is_absent_but_not_the_default():
    gemma2 = {"architectures": ["Gemma2ForCausalLM"]}
    assert read(gemma2).attention_softcap == 50.0
    assert read(gemma2, attn_logit_softcapping=None).attention_softcap is None
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(mistral).windows[0] == 4096
    assert read(mistral, sliding_window=None).windows[0] is None
    assert read(head_dim=None, num_key_value_heads=None).head_dim == 16


def test_scalings():
    stretched = read(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert stretched.max_length == 2048
    assert read(rope_scaling={"type": "linear", "factor": 4.0}).max_length == 512


BAD = [
    ({"hidden_size": "absent"}, "'hidden_size' is missing"),
    ({"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_hidden_layers": 1 << 64}, "num_hidden_layers is 18446744073709551616, not a whole number of at most 10000"),
    (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9, "num_experts_per_tok": 1},
        "num_local_experts is 1000000000, not a whole number of at most 10000",
    ),
    ({"vocab_size": 10**12}, "vocab_size is 1000000000000, not a whole number of at most 4294967295"),
    ({"num_attention_heads": True}, "num_attention_heads is True"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
    ({"head_dim": 15}, r"15 channels of each head are rotated; .* even and from 2 to head_dim \(15\)"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"hidden_act": 3}, "hidden_act is 3, not a string"),
    ({"rope_scaling": {"type": "linear"}}, "RoPE: 'factor' is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor 0.5 is below 1"),
    ({"rope_scaling": 4.0}, "RoPE entries are a float"),
    ({"rope_theta": 0}, "rope_theta is 0.0, but must be above 0"),
    ({"rope_theta": -1.0, "rope_scaling": {"type": "longrope"}}, "rope_theta is -1.0, but must be above 0"),
    ({"partial_rotary_factor": 1e308}, r"partial_rotary_factor is 1e\+308, but must be from 0 to 1"),
    (
        {"rope_scaling": {"type": "longrope", "factor": 2, "original_max_position_embeddings": 1, "short_factor": 3}},
        "short_factor is a int, not a list",
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 1e308}}, r"factor 1e\+308 is above 1000000"),
    (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": 3},
            "query_pre_attn_scalar": 16,
        },
        "RoPE entries of sliding_attention are a int",
    ),
    (
        {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0},
        "query_pre_attn_scalar is 0.0, not a number",
    ),
    ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling is 0.0, not a number"),
    (
        {
            "architectures": ["BambaForCausalLM"],
            **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups"), 8),
            "num_key_value_heads": 4,
            "attn_layer_indices": [1],
            "time_step_limit": float("inf"),
        },
        "time_step_limit is inf, not a list",
    ),
    (
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3},
        "mlp_only_layers is 3, not a list of layer numbers",
    ),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
        "high_freq_factor 1.0 must be above low_freq_factor 4.0",
    ),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "not a list of 8 numbers"),
    (
        {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]},
        "layer_types has 1 entries; expected one",
    ),
    ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers must be a list"),
    (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3},
        "num_experts_per_tok 3 exceeds the 2 experts",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_contradictions_are_refused_in_one_line(changes, message):
    with pytest.raises(ModelError, match=message) as caught:
        read(changes)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, NotNative)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral'"),
        ({"hidden_act": "wave"}, "activation 'wave'"),
        ({"architectures": ["IQuestCoderForCausalLM"], "clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ],
)
def test_what_transformers_may_know_is_said_to_be_not_native(changes, message):
    with pytest.raises(NotNative, match=f"{message}.*use backend='transformers'"):
        read(changes)
