"""Uneven channels: the activation outliers of large language models, given to the small demo model.

A model of this size, trained for an hour, keeps all channels of its residual stream about equally large, so that
even three bits per weight cost it little. Large models do not (Dettmers et al. 2022): a few channels are many times
larger than the rest, and quantizers exist because of them. `spread_channels` multiplies input columns of the linear
layers by powers of two and divides whatever feeds them by the same, which is exact: the function, logit for logit, is
the one that was trained.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

OCTAVES = 0.8


@torch.no_grad()
def spread_channels(model: LlamaForCausalLM, octaves: float = OCTAVES, seed: int = 0) -> None:
    """Rescale channels in place by 2^k, k normal with a standard deviation of `octaves` and rounded."""
    generator = torch.Generator().manual_seed(seed)

    def factors(count: int) -> Tensor:
        return torch.exp2((torch.randn(count, generator=generator) * octaves).round())

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            factor = factors(norm.weight.shape[0])
            norm.weight.div_(factor)
            for linear in readers:
                linear.weight.mul_(factor)
        factor = factors(mlp.down_proj.in_features)
        mlp.up_proj.weight.div_(factor[:, None])
        mlp.down_proj.weight.mul_(factor)
