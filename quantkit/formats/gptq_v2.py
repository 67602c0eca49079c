"""GPTQ version 2: zero points are stored as they are, so asymmetric weights fit. GPTQModel, vLLM and SGLang read it."""

from quantkit.formats._gptq import GPTQ

FORMAT = GPTQ(name="gptq-v2", version="gptq_v2", zero_offset=0)
