"""llama.cpp (llama-cpp-python 0.3), run on CPUs: GGUF files and nothing else."""

from quantkit.engines.base import CPU, Engine, Reads, Rule, read_rules

_RULES = read_rules(
    """
fast format=gguf
    its own format; activations become 8-bit in products
    ggml/src/ggml-cpu
no
    it reads GGUF only: set format=gguf, or quantkit convert CHECKPOINT --to gguf
    src/llama-model-loader.cpp
""",
    capability=(CPU, 999),
)
_CACHE = "a GGUF file says nothing of the cache: 16-bit keys and values"

ENGINE = Engine(
    title="llama.cpp",
    release="llama-cpp-python 0.3",
    rules=_RULES,
    ordinary=Rule(
        reads=Reads.FAST,
        reason="after convert_hf_to_gguf.py",
        source="convert_hf_to_gguf.py",
        capability=(CPU, 999),
    ),
    caches={"own": _CACHE, "fp8": _CACHE},
    devices=False,
)
