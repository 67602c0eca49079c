"""Writes gguf.json beside this file: what the gguf library makes of fixed values, and what it reads from fixed bytes.

Run it by hand after a change of a layout, where gguf 0.19 is installed: python tests/golden/make_gguf.py
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Types
from gguf import quants

ENCODED = ("Q4_0", "Q4_1", "Q5_0", "Q8_0")
DECODED = {"Q4_K": (144, (0, 2)), "Q6_K": (210, (208,))}


def fixed_values() -> np.ndarray:
    """Four rows of 64 values: smooth, all equal, zero, and one outlier."""
    count = np.arange(64, dtype=np.float32)
    rows = [np.sin(count * 1.7) * (1 + count / 9), np.full(64, 0.3), np.zeros(64), np.where(count == 5, 10, count / 64)]
    return np.stack(rows).astype(np.float32)


def fixed_blocks(size: int, halves: tuple[int, ...]) -> np.ndarray:
    """Two blocks of every kind of byte, with 16-bit scales that are numbers."""
    data = (np.arange(2 * size) * 37 + np.arange(2 * size) ** 2 // 5).astype(np.uint8).reshape(2, size)
    for offset in halves:
        data[:, offset : offset + 2] = np.array([[0.25 + offset / 64]], np.float16).view(np.uint8)
    return data


def whole_file() -> bytes:
    """A file with one entry of every kind of value that a model needs, and two tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("golden")
        writer.add_context_length(64)
        writer.add_rope_freq_base(10000.0)
        writer.add_add_bos_token(True)
        writer.add_token_list(["<s>", "ä", "b"])
        writer.add_token_scores([0.0, -1.0, -2.5])
        writer.add_token_types([3, 1, 1])
        writer.add_tensor("output_norm.weight", np.arange(5, dtype=np.float32))
        values = fixed_values()
        writer.add_tensor("token_embd.weight", quants.quantize(values, Types.Q4_0), raw_dtype=Types.Q4_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def main() -> None:
    values = fixed_values()
    data = {
        "library": f"gguf {version('gguf')}",
        "values": values.tolist(),
        "encoded": {name: quants.quantize(values, getattr(Types, name)).tobytes().hex() for name in ENCODED},
        "decoded": {},
        "file": whole_file().hex(),
    }
    for name, (size, halves) in DECODED.items():
        blocks = fixed_blocks(size, halves)
        found = quants.dequantize(blocks, getattr(Types, name))
        data["decoded"][name] = {"blocks": blocks.tobytes().hex(), "values": found.astype(np.float32).tobytes().hex()}
    Path(__file__).with_name("gguf.json").write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
