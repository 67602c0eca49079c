"""llama.cpp (llama-cpp-python 0.3), run on CPUs: GGUF files and nothing else."""

from quantkit.engines.base import CPU, Engine, Reads, Rule

ENGINE = Engine(
    title="llama.cpp",
    release="llama-cpp-python 0.3",
    rules=(
        Rule(
            reads=Reads.FAST,
            format=("gguf",),
            capability=(CPU, 999),
            reason="its own format; activations become 8-bit in products",
            source="ggml/src/ggml-cpu",
        ),
        Rule(
            reads=Reads.NO,
            capability=(CPU, 999),
            reason="it reads GGUF only: set format=gguf, or quantkit convert CHECKPOINT --to gguf",
            source="src/llama-model-loader.cpp",
        ),
    ),
    ordinary=Rule(
        reads=Reads.FAST,
        reason="after convert_hf_to_gguf.py",
        source="convert_hf_to_gguf.py",
        capability=(CPU, 999),
    ),
    caches={
        "own": "a GGUF file says nothing of the cache: 16-bit keys and values",
        "fp8": "a GGUF file says nothing of the cache: 16-bit keys and values",
    },
    devices=False,
)
