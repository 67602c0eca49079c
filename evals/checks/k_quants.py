"""Q4_K and Q6_K of a model by quantkit and by llama.cpp's own quantizer, from the same float GGUF file: perplexities.

    python k_quants.py FLOAT.gguf OURS_Q4_K.gguf OURS_Q6_K.gguf IDS.json WORK [IMPORTANCE.npz]

IMPORTANCE.npz: mean square of each input by the name of the tensor in the file, what ours were made with.

Run where llama-cpp-python is installed; `quantkit convert MODEL --to gguf --type TYPE` makes the float file and ours.
Both leave norms alone and give the head of a Q4_K file 6 bits, as llama-quantize does; WORK gets llama.cpp's files.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from loader_logits import perplexity, with_llama_cpp

# llama.cpp's numbers: of a whole file, of the type of the embedding, which is the head of a tied model.
FILE_TYPES = {"q4_k": (14, 14), "q6_k": (18, 14)}


def quantize(source: str, target: Path, file_type: int, head: int, importance: dict[str, np.ndarray]) -> None:
    """llama.cpp's own quantizer, every matrix of the layers of one type."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = file_type, 1, True
    params.output_tensor_type = params.token_embedding_type = head
    entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()  # the last one, empty, ends the list
    pointer = ctypes.POINTER(ctypes.c_float)
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        entry.name, entry.data, entry.size = name.encode(), values.ctypes.data_as(pointer), values.size
    if importance:
        params.imatrix = entries
    status = llama_cpp.llama_model_quantize(source.encode(), str(target).encode(), ctypes.byref(params))
    assert status == 0, f"llama.cpp could not quantize {source}"


def measure(path: str, text: list[list[int]]) -> float:
    """Perplexity of one file."""
    forward, _ = with_llama_cpp(path, "float32")
    return perplexity([forward(ids) for ids in text], text)


def main() -> None:
    """Command line."""
    source, q4_k, q6_k, ids, work, *given = sys.argv[1:]
    importance = (
        {name: np.ascontiguousarray(values, np.float32) for name, values in np.load(given[0]).items()} if given else {}
    )
    text = json.loads(Path(ids).read_text())["text"]
    print(f"float: {measure(source, text):.5f}")
    for name, ours in (("q4_k", q4_k), ("q6_k", q6_k)):
        theirs = Path(work) / f"llama-cpp-{name}.gguf"
        quantize(source, theirs, *FILE_TYPES[name], importance)
        found = measure(ours, text), measure(str(theirs), text)
        sizes = Path(ours).stat().st_size, theirs.stat().st_size
        print(f"{name}: quantkit {found[0]:.5f} ({sizes[0]} bytes), llama.cpp {found[1]:.5f} ({sizes[1]} bytes)")


if __name__ == "__main__":
    main()
