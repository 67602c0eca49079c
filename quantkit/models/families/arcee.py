"""Arcee AFM: Llama with an MLP of squared ReLU without a gate."""

from quantkit.models.family import Family, Parts

FAMILY = Family(hf_names=("ArceeForCausalLM",), native=False, parts=Parts(up=("mlp.up_proj",), gated=False))
