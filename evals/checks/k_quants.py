"""Q4_K and Q6_K of a model by quantkit and by llama.cpp's own quantizer, from the same float GGUF file: perplexities.

    python k_quants.py FLOAT.gguf OURS_Q4_K.gguf OURS_Q6_K.gguf IDS.json WORK

Run where llama-cpp-python is installed; `quantkit convert MODEL --to gguf --type TYPE` makes the float file and ours.
Both leave norms alone and give the head of a Q4_K file 6 bits, as llama-quantize does; WORK gets llama.cpp's files.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
from loader_logits import perplexity, with_llama_cpp

# llama.cpp's numbers: of a whole file, of the type of the embedding, which is the head of a tied model.
FILE_TYPES = {"q4_k": (14, 14), "q6_k": (18, 14)}


def quantize(source: str, target: Path, file_type: int, head: int) -> None:
    """llama.cpp's own quantizer, every matrix of the layers of one type."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = file_type, 1, True
    params.output_tensor_type = params.token_embedding_type = head
    status = llama_cpp.llama_model_quantize(source.encode(), str(target).encode(), ctypes.byref(params))
    assert status == 0, f"llama.cpp could not quantize {source}"


def measure(path: str, text: list[list[int]]) -> float:
    """Perplexity of one file."""
    forward, _ = with_llama_cpp(path, "float32")
    return perplexity([forward(ids) for ids in text], text)


def main() -> None:
    """Command line."""
    source, q4_k, q6_k, ids, work = sys.argv[1:]
    text = json.loads(Path(ids).read_text())["text"]
    print(f"float: {measure(source, text):.5f}")
    for name, ours in (("q4_k", q4_k), ("q6_k", q6_k)):
        theirs = Path(work) / f"llama-cpp-{name}.gguf"
        quantize(source, theirs, *FILE_TYPES[name])
        found = measure(ours, text), measure(str(theirs), text)
        sizes = Path(ours).stat().st_size, theirs.stat().st_size
        print(f"{name}: quantkit {found[0]:.5f} ({sizes[0]} bytes), llama.cpp {found[1]:.5f} ({sizes[1]} bytes)")


if __name__ == "__main__":
    main()
