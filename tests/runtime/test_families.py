"""Every native family computes what transformers computes, whatever the chunks; and every feature of it matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.kernels.reference import experts
from quantkit.models.families import find
from quantkit.runtime.model import loader, weights
from quantkit.runtime.model.config import ModelConfig, read_config
from quantkit.runtime.model.loader import load_model, load_native
from quantkit.runtime.model.weights import Weights
from tests.helpers import EXPERT_FAMILIES, FAMILIES, GRANITE_EXPERTS, MORE_FAMILIES, NEMOTRON_EXPERTS
from tests.runtime.helpers import difference, make_loud_model, prompts, reference_logits, run

CLOSE = 1e-4
FAR = 1e-2
LENGTHS = (1, 40, 300)


def scaled(kind: str, **entries: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **entries}}


YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.5 + i / 8 for i in range(8)], "long_factor": [3.0 + i for i in range(8)]}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES)},
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, all kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 48}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, linear": ("llama", scaled("linear", factor=4.0)),
    "llama, yarn": ("llama", scaled("yarn", **YARN)),
    "llama, yarn mscale": ("llama", scaled("yarn", **YARN, mscale=1.4, mscale_all_dim=0.6, truncate=False)),
    "llama, llama3": (
        "llama",
        scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "stablelm, linear": ("stablelm", scaled("linear", factor=2.0, partial_rotary_factor=0.5)),
    "qwen2, upper window": ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    "qwen3, all windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 32, "layer_types": ["sliding_attention"] * 2},
    ),
    "smollm3, window": ("smollm3", {"use_sliding_window": True, "sliding_window": 32}),
    "gemma3_text, scaled": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "granitemoehybrid, positions": ("granitemoehybrid", {"position_embedding_type": "rope", "mamba_n_groups": 1}),
    "granitemoehybrid, experts": ("granitemoehybrid", GRANITE_EXPERTS),
    "nemotron_h, experts": ("nemotron_h", NEMOTRON_EXPERTS),
    "cohere, qk norm": ("cohere", {"use_qk_norm": True}),
    "phi, qk norm": ("phi", {"qk_layernorm": True}),
    "phi3, longrope": ("phi3", {**scaled("longrope", **LONG), "original_max_position_embeddings": 300}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "gpt_neox, serial": ("gpt_neox", {"use_parallel_residual": False}),
    "mixtral, no window": ("mixtral", {"sliding_window": None}),
    "qwen2_moe, some layers": (
        "qwen2_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen2_moe, window": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 32}),
    "qwen3_moe, plain router": ("qwen3_moe", {"norm_topk_prob": False}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "olmoe, clipped": ("olmoe", {"clip_qkv": 0.5}),
    "olmo3, scaled": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "exaone4, no window": ("exaone4", {"layer_types": ["full_attention"] * 4, "sliding_window": None}),
    "hunyuan_v1_dense, alpha": ("hunyuan_v1_dense", scaled("dynamic", alpha=1000.0, factor=1.0)),
    "deepseek_v2, yarn": (
        "deepseek_v2",
        {
            **scaled("yarn", **YARN, mscale=0.7, mscale_all_dim=0.5),
            "topk_method": "greedy",
            "q_lora_rank": None,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v2, groups": ("deepseek_v2", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {**scaled("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0), "attention_bias": True, "v_head_dim": 24},
    ),
    "glm4_moe, groups": (
        "glm4_moe",
        {"use_qk_norm": True, "routed_scaling_factor": 2.0, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    ),
}


class Case:
    """A random model on disk and what transformers computes with it."""

    def __init__(self, folder, family, changes):
        self.folder = make_loud_model(folder, family, **changes)
        self.sequences = prompts(*LENGTHS)
        self.expected = reference_logits(self.folder, self.sequences)
        self.reader = CheckpointReader(self.folder)
        self.config = read_config(self.reader.config, find(self.reader.config))

    def load(self, config: ModelConfig | None = None):
        return load_native(self.reader, config or self.config, dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    made: dict[str, Case] = {}

    def get(variant: str) -> Case:
        if variant not in made:
            made[variant] = Case(tmp_path_factory.mktemp("loud"), *VARIANTS[variant])
        return made[variant]

    return get


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_at_every_position(case, variant):
    this = case(variant)
    model = load_model(this.folder, dtype="float32", backend="native")
    worst = {chunk: difference(run(model, this.sequences, chunk), this.expected) for chunk in (None, 64, 7)}
    worst[1] = difference(run(model, this.sequences[:2], 1), this.expected[:2])
    assert max(worst.values()) < CLOSE, worst


@pytest.mark.parametrize("variant", ["llama", "gemma3_text", "mixtral"])
def test_token_by_token_over_a_long_prompt(case, variant):
    this = case(variant)
    assert difference(run(this.load(), this.sequences, 1), this.expected) < CLOSE


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {**scaled("dynamic", factor=4.0), "max_position_embeddings": 64}),
        ("phi3", {**scaled("longrope", **LONG), "original_max_position_embeddings": 64}),
    ],
)
@pytest.mark.parametrize("chunk", [None, 64, 7])
def test_wavelengths_that_depend_on_the_length(tmp_path, family, changes, chunk):
    """They are those of each step's length, as in transformers, so its steps are the reference."""
    from transformers import AutoModelForCausalLM, DynamicCache

    folder = make_loud_model(tmp_path, family, **changes)
    sequences = prompts(30, 64, 150)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = []
    for sequence in sequences:
        cache, parts = DynamicCache(), []
        for start in range(0, len(sequence), chunk or len(sequence)):
            step = torch.tensor([sequence[start : start + (chunk or len(sequence))]])
            with torch.inference_mode():
                parts.append(reference(input_ids=step, past_key_values=cache).logits[0])
        expected.append(torch.cat(parts))
    model = load_model(folder, dtype="float32", backend="native")
    assert model.max_length >= 150
    assert difference(run(model, sequences, chunk), expected) < CLOSE
    default = with_rope(model.config, kind="default", attention_factor=1.0)
    plain = load_native(CheckpointReader(folder), default, dtype="float32", device=torch.device("cpu"))
    assert difference(run(plain, sequences, chunk), expected) > FAR


def with_window(config: ModelConfig, window: int | None) -> ModelConfig:
    return replace(config, windows=(window,) * config.num_layers)


def with_rope(config: ModelConfig, **changes: Any) -> ModelConfig:
    return replace(config, ropes=tuple(rope and replace(rope, **changes) for rope in config.ropes))


def change_rope(**changes: Any):
    return lambda config: with_rope(config, **changes)


def change_parts(**changes: Any):
    def change(config: ModelConfig) -> ModelConfig:
        family = config.family
        return replace(config, family=replace(family, parts=replace(family.parts, **changes)))

    return change


def one_rope(config: ModelConfig) -> ModelConfig:
    full = config.ropes[config.windows.index(None)]
    return replace(config, ropes=(full,) * config.num_layers)


def positions_everywhere(config: ModelConfig) -> ModelConfig:
    return replace(config, ropes=(next(filter(None, config.ropes)),) * config.num_layers)


def change_experts(**changes: Any):
    def change(config: ModelConfig) -> ModelConfig:
        return replace(config, experts=replace(config.experts, **changes))

    return change


def change_norm(config: ModelConfig, **changes: Any) -> ModelConfig:
    return replace(config, family=replace(config.family, qk_norm=replace(config.family.qk_norm, **changes)))


def no_shared_expert(config: ModelConfig) -> ModelConfig:
    family = config.family
    experts = replace(family.experts, shared_up=(), shared_down=None, shared_gate=None)
    return replace(config, family=replace(family, experts=experts))


SWITCHES = {
    "window in all layers": ("mistral", lambda config: with_window(config, None)),
    "window in upper layers": ("qwen2, upper window", lambda config: with_window(config, None)),
    "full attention between windows": ("gemma2", lambda config: with_window(config, 32)),
    "norm of queries and keys by head": ("qwen3", lambda config: replace(config, qk_norm=False)),
    "norm of queries and keys, all heads": ("olmo2", lambda config: replace(config, qk_norm=False)),
    "norm of queries and keys, each head": ("cohere, qk norm", lambda config: replace(config, qk_norm=False)),
    "linear scaling": ("llama, linear", change_rope(kind="default")),
    "yarn": ("llama, yarn", change_rope(kind="default")),
    "attention factor of yarn": ("llama, yarn", change_rope(attention_factor=1.0)),
    "llama 3 scaling": ("llama, llama3", change_rope(kind="default")),
    "longrope": ("phi3, longrope", change_rope(kind="default")),
    "base of the wavelengths": ("smollm3", change_rope(theta=10000.0)),
    "partial rotation": ("stablelm", change_rope(width=16)),
    "neighbours as pairs": ("glm4", change_rope(interleaved=False)),
    "local wavelengths": ("gemma3_text", one_rope),
    "layers without positions": ("smollm3", positions_everywhere),
    "positions only with a window": ("cohere2", positions_everywhere),
    "softcap of attention": ("gemma2", lambda config: replace(config, attention_softcap=None)),
    "softcap of logits": ("gemma2", lambda config: replace(config, logits_softcap=None)),
    "scale of embeddings": ("granite", lambda config: replace(config, embedding_scale=1.0)),
    "root of the width": ("gemma", lambda config: replace(config, embedding_scale=1.0)),
    "scale of the residual": ("granite", lambda config: replace(config, residual_scale=1.0)),
    "scale of attention": ("granite", lambda config: replace(config, attention_scale=0.25)),
    "root scale of attention": ("gemma2", lambda config: replace(config, attention_scale=32**-0.5)),
    "divisor of logits": ("granite", lambda config: replace(config, logits_scale=1.0)),
    "scale of logits": ("cohere", lambda config: replace(config, logits_scale=1.0)),
    "offset of norms": ("gemma", lambda config: replace(config, norm_offset=0.0)),
    "norm after attention": ("gemma2", change_parts(attention_norm=None)),
    "norm after the MLP": ("olmo2", change_parts(output_norm=None)),
    "parallel residual": ("gpt_neox", lambda config: replace(config, parallel=False)),
    "blocks in one projection": ("codegen", change_parts(qkv_blocks=2)),
    "heads interleaved in one projection": ("gpt_neox", change_parts(qkv_by_head=False)),
    "activation": ("llama, gelu", lambda config: replace(config, activation="silu")),
    "scores of the chosen sum to one": ("mixtral", change_experts(normalize=False)),
    "scores of the chosen do not": ("olmoe", change_experts(normalize=True)),
    "experts per token": ("qwen3_moe", change_experts(num_chosen=1)),
    "shared expert": ("qwen2_moe", no_shared_expert),
    "sigmoid of router logits": ("glm4_moe, groups", change_experts(scoring="softmax")),
    "groups of experts": ("glm4_moe, groups", change_experts(num_groups=1)),
    "groups by their best": ("deepseek_v2, groups", change_experts(group_rule="two")),
    "sharper scores": (
        "deepseek_v3, yarn",
        lambda config: replace(config, attention_scale=32**-0.5),
    ),
    "neighbours as pairs, latent": ("deepseek_v3", change_rope(interleaved=False)),
    "halves as pairs, latent": ("youtu", change_rope(interleaved=True)),
    "experts without a gate": ("nemotron_h, experts", lambda config: replace(config, activation="relu")),
    "an MLP beside experts": ("granitemoehybrid, experts", no_shared_expert),
    "sinks": ("gpt_oss", lambda config: replace(config, family=replace(config.family, sinks=None))),
    "queries that grow": ("ministral3", change_rope(growth=0.0)),
    "scale of experts": ("glm4_moe, groups", change_experts(scale=1.0)),
    "norms behind the rotation": ("hunyuan_v1_dense", lambda config: change_norm(config, after_rotation=False)),
    "bound of queries, keys and values": ("olmo, clipped", lambda config: replace(config, clip=None)),
    "wavelengths with a fixed alpha": ("hunyuan_v1_dense, alpha", change_rope(theta=10000.0)),
    "windows unscaled": ("olmo3, scaled", one_rope),
    "positions only with a window, if any": ("exaone4", positions_everywhere),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_feature_switched_off_is_noticed(case, monkeypatch, switch):
    variant, change = SWITCHES[switch]
    this = case(variant)
    monkeypatch.setattr(loader, "check_tensors", lambda *args: None)  # weights that nobody reads are refused elsewhere
    assert difference(run(this.load(change(this.config)), this.sequences), this.expected) > FAR


@pytest.mark.parametrize("variant", ["dots1", "ernie4_5_moe", "minimax_m2"])
def test_a_balance_left_out_is_noticed(case, monkeypatch, variant):
    this = case(variant)
    plain = experts.choose_experts
    monkeypatch.setattr(weights, "choose_experts", lambda scores, experts, balance: plain(scores, experts, None))
    assert difference(run(this.load(), this.sequences), this.expected) > FAR


@pytest.mark.parametrize("variant", ["qwen2", "starcoder2", "llama, biases", "phi"])
def test_biases_left_out_are_noticed(case, monkeypatch, variant):
    this = case(variant)
    monkeypatch.setattr(Weights, "biases", lambda self, names, weights: None)
    assert difference(run(this.load(), this.sequences), this.expected) > FAR
