"""The demo model's shape, its initialisation, and the causal attention that its training uses on a CPU.

The initialisation is mimetic (Trockman and Kolter 2023): some heads start near what such heads are known to become,
one that looks a token back and some that find that token again (Olsson et al. 2022, induction heads). From random
weights the same circuit forms too, but costs most of a small budget of tokens. Everything is trained from there.

The attention is plain matrix products in two blocks of queries: in bfloat16 on one core it takes half the time of
the fused kernel's forward and backward. It has no mask, dropout or cache: training only.
"""

from __future__ import annotations

import torch
from tokenizer import VOCAB_SIZE
from torch import Tensor, nn
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM

QUERY_BLOCKS = 2
COMMON_NORM = 0.2
RESIDUAL_SCALE = 0.2
WRITE_GAIN = 0.05
MATCH_GAIN = 1.5


def build_model(seed: int, *, bos: int, eos: int) -> LlamaForCausalLM:
    """A freshly initialised model; every projection's widths are multiples of 256."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    mimetic_init(model)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=eos)
    return model


@torch.no_grad()
def mimetic_init(model: LlamaForCausalLM) -> None:
    """Start two heads of layer 0 as previous-token heads, and some of layers 1 and 2 as induction heads, in place."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(RESIDUAL_SCALE)
        layer.mlp.down_proj.weight.mul_(RESIDUAL_SCALE)
    embeddings = model.model.embed_tokens.weight
    hidden, dim = embeddings.shape[1], model.config.head_dim
    common = torch.randn(hidden).sign() / hidden**0.5  # the unit direction that every token shares
    embeddings += COMMON_NORM * common
    # Orthonormal: what a head reads of a token, and where the previous-token head writes it.
    basis = torch.linalg.qr(torch.cat([common[:, None], torch.randn(hidden, 4 * dim - 1)], dim=1))[0]
    read, written = basis[:, 1 : 1 + dim].T, basis[:, 1 + dim : 1 + 2 * dim].T  # (D, hidden) each
    _look_back(model.model.layers[0].self_attn, common, read, written)
    for layer, groups in ((1, (0, 1)), (2, (0,))):
        for group in groups:
            _find_again(model.model.layers[layer].self_attn, group, read, written)


def _look_back(attention: nn.Module, common: Tensor, read: Tensor, written: Tensor) -> None:
    """Make group 0 attend one token back and write what it reads there into the `written` subspace."""
    dim = attention.head_dim
    half = dim // 2
    angle = attention.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    strong = (angle > 0.05).float()  # slower pairs cannot tell neighbours apart
    key = torch.cat([strong, torch.zeros(half)])
    # Rotated by one position more than the key: the product peaks at distance one.
    query = torch.cat([strong * angle.cos(), -strong * angle.sin()])
    # Added to the random weights: rows of zeros would get no gradient and stay zero.
    attention.k_proj.weight[:dim] += torch.outer(key, common)
    for head in range(attention.num_key_value_groups):
        rows = slice(head * dim, (head + 1) * dim)
        attention.q_proj.weight[rows] += torch.outer(query, common)
        attention.o_proj.weight[:, rows] = WRITE_GAIN * written.T / attention.num_key_value_groups
    attention.v_proj.weight[:dim] = read


def _find_again(attention: nn.Module, group: int, read: Tensor, written: Tensor) -> None:
    """Make a group attend to where the current token was the previous one, and predict what stands there."""
    dim, heads = attention.head_dim, attention.num_key_value_groups
    attention.k_proj.weight[group * dim : (group + 1) * dim] = MATCH_GAIN * written
    copied = torch.linalg.qr(torch.randn(read.shape[1], dim))[0].T  # (D, hidden)
    attention.v_proj.weight[group * dim : (group + 1) * dim] = copied
    for head in range(group * heads, (group + 1) * heads):
        rows = slice(head * dim, (head + 1) * dim)
        attention.q_proj.weight[rows] = MATCH_GAIN * read
        attention.o_proj.weight[:, rows] = WRITE_GAIN * copied.T / heads


def use_training_attention(model: LlamaForCausalLM) -> None:
    """Switch a model to `blocked_attention`."""
    AttentionInterface.register("blocked_cpu", blocked_attention)
    model.set_attn_implementation("blocked_cpu")


def blocked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Causal grouped-query attention without materialising the keys that a block of queries cannot see.

    Args:
        query: (B, H, T, D). key, value: (B, G, T, D), G divides H, QUERY_BLOCKS divides T.
    Returns:
        (B, T, H, D), and no attention weights.
    """
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    block = length // QUERY_BLOCKS
    query = (query * scaling).view(batch, groups, heads // groups, length, dim)
    outputs = []
    for start in range(0, length, block):
        end = start + block
        rows = query[:, :, :, start:end].reshape(batch * groups, -1, dim)  # (B*G, H/G*block, D)
        seen_key = key[:, :, :end].reshape(batch * groups, end, dim)  # (B*G, end, D)
        seen_value = value[:, :, :end].reshape(batch * groups, end, dim)
        scores = torch.bmm(rows, seen_key.transpose(1, 2)).view(batch * groups, -1, block, end)
        future = torch.full((block, end), float("-inf"), dtype=scores.dtype).triu(start + 1)
        weights = torch.softmax(scores + future, dim=-1).view(batch * groups, -1, end)
        outputs.append(torch.bmm(weights, seen_value).view(batch, groups, -1, block, dim))
    output = torch.cat(outputs, dim=3).view(batch, heads, length, dim)
    return output.transpose(1, 2).contiguous(), None
