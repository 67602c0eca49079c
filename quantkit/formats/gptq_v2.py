"""GPTQ version 2: zero points are stored without an offset, so asymmetric weights fit.

GPTQModel, vLLM and SGLang read it.
"""

from typing import ClassVar

from quantkit.formats.gptq import GPTQFormat


class GPTQv2Format(GPTQFormat):
    """GPTQ version 2; see `gptq` for the layout."""

    name: ClassVar[str] = "gptq-v2"
    version: ClassVar[str] = "gptq_v2"
    zero_offset: ClassVar[int] = 0
    tag: ClassVar[str] = "gptq"


FORMAT = GPTQv2Format()
