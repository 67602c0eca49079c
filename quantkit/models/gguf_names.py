"""Names of a model's modules in GGUF files, for reading and writing. Torch-free.

Source: llama.cpp `gguf-py/gguf/constants.py`, `tensor_mapping.py`.
"""

import math

from quantkit.models.description import ModelDescription
from quantkit.models.family import Family
from quantkit.models.layer_tensors import norm_names
from quantkit.models.rope import RopeConfig

EXPERTS = "_exps"
"""End of the name of a tensor (E, N, K) that stacks one linear of all experts."""


def outer_names(family: Family) -> dict[str, str]:
    """Return the GGUF name of each module outside the layers, keyed by the module's name."""
    # In families with GGUF names, only these modules and learned positions are outside the layers.
    names = {name.removesuffix(".weight"): "position_embd" for name in family.outside}
    return names | {family.embedding: "token_embd", family.final_norm: "output_norm", family.head: "output"}


def layer_names(model: ModelDescription) -> dict[str, str]:
    """Map the relative name of each module of a layer to the module's GGUF name, without the layer's number.

    `{expert}` in a module's name stands for all experts, whose linears the GGUF tensor stacks.
    """
    parts, qk_norm = model.family.parts, model.family.qk_norm
    before, after, before_mlp, after_mlp = norm_names(model)
    qkv = ("attn_qkv",) if len(parts.qkv) == 1 else ("attn_q", "attn_k", "attn_v")
    up = ("ffn_up",) if len(parts.up) == 1 else ("ffn_gate", "ffn_up")
    assert model.family.gguf is not None
    pairs: list[tuple[str | None, str]] = [
        (before, "attn_norm"),
        *(zip(parts.qkv, qkv, strict=True) if model.latent is None else _LATENT),
        (parts.output, "attn_output"),
        (after, "post_attention_norm"),
        (before_mlp, model.family.gguf.mlp_norm),
        *zip(parts.up, up, strict=True),
        (parts.down, "ffn_down"),
        (after_mlp, "post_ffw_norm"),
    ]
    if qk_norm is not None and model.qk_norm:
        pairs += [(qk_norm.query, "attn_q_norm"), (qk_norm.key, "attn_k_norm")]
    if (experts := model.family.experts) is not None:
        pairs += [(experts.router, "ffn_gate_inp"), (experts.shared_gate, "ffn_gate_inp_shexp")]
        pairs += zip((*experts.up, experts.down), (f"ffn_{kind}{EXPERTS}" for kind in _MLP), strict=True)
        if experts.shared_down is not None:
            pairs += zip((*experts.shared_up, experts.shared_down), (f"ffn_{kind}_shexp" for kind in _MLP), strict=True)
    return {module: name for module, name in pairs if module is not None}


_MLP = ("gate", "up", "down")
_LATENT = (
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
)


def vector_names(model: ModelDescription) -> dict[str, str]:
    """Return the GGUF names of a layer's tensors that belong to no module, keyed by relative name."""
    family = model.family
    names = {} if family.sinks is None else {family.sinks: "attn_sinks.weight"}
    if family.experts is not None and family.experts.balance is not None:
        names[family.experts.balance] = "exp_probs_b.bias"
    return names


def interleaved_heads(model: ModelDescription) -> dict[str, int]:
    """Return the linears whose rows GGUF files reorder within each head, as {linear's name: number of heads}."""
    if model.family.gguf is None or not model.family.gguf.interleaved:
        return {}
    return dict(zip(model.family.parts.qkv[:2], (model.num_heads, model.num_kv_heads), strict=False))


def norm_modules(model: ModelDescription) -> set[str]:
    """Return the names of all norms. In GGUF files, their weights include the family's `norm_offset`.

    Names are relative to the layer, except that of the final norm.
    """
    family = model.family
    names = {family.final_norm, *filter(None, norm_names(model))}
    return names | ({family.qk_norm.query, family.qk_norm.key} if family.qk_norm is not None else set())


def llama3_divisors(rope: RopeConfig) -> list[float]:
    """Return the R/2 divisors of the rotary frequencies that GGUF files of Llama 3.1 and later store."""
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    divisors = []
    for pair in range(0, rope.width, 2):
        # Divide the frequencies of long wavelengths by the factor, keep those of short ones, and blend in between.
        wavelength = 2 * math.pi * rope.theta ** (pair / rope.width)
        smooth = min(1.0, max(0.0, (rope.original_length / wavelength - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return divisors
