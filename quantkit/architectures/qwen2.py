"""Qwen2: Llama with biases on q, k and v; the biases stay as they are, that of v shrinks with its smoothing scale."""

from quantkit.architectures.base import Architecture

ARCHITECTURE = Architecture(hf_names=("Qwen2ForCausalLM",))
