"""Writes compressed_tensors.json beside this file: what the reference library makes of fixed codes.

Run it by hand after a change of the layout: python tests/golden/make_compressed_tensors.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

ROWS, WIDTH, GROUP = 3, 40, 8


def fixed_codes(bits: int, shape: tuple[int, int], step: int) -> torch.Tensor:
    """Codes without a short period, every value of the type among them."""
    count = torch.arange(shape[0] * shape[1])
    codes = (count * step + count * count // 3) % 2**bits - 2 ** (bits - 1)
    return codes.view(shape).to(torch.int8)


def reference(bits: int, symmetric: bool) -> dict[str, Any]:
    """One case: the library quantizes exactly decodable values and packs them."""
    codes = fixed_codes(bits, (ROWS, WIDTH), 7)
    zero = fixed_codes(bits, (ROWS, WIDTH // GROUP), 5)
    scale = 2.0 ** (torch.arange(ROWS * WIDTH // GROUP) % 4 - 3).view(ROWS, WIDTH // GROUP)
    offset = torch.zeros_like(scale) if symmetric else zero.float()
    values = (codes.view(ROWS, -1, GROUP).float() - offset.unsqueeze(-1)) * scale.unsqueeze(-1)
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=GROUP)
    tensors = {"weight": values.view(ROWS, WIDTH), "weight_scale": scale}
    if not symmetric:
        tensors["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = compressor.compress(tensors, QuantizationScheme(targets=["Linear"], weights=args))
    return {
        "bits": bits,
        "symmetric": symmetric,
        "group_size": GROUP,
        "codes": codes.tolist(),
        "scale": scale.tolist(),
        "zero_point": None if symmetric else zero.tolist(),
        "tensors": {name: {"dtype": str(t.dtype), "values": t.tolist()} for name, t in sorted(packed.items())},
    }


if __name__ == "__main__":
    cases = [reference(bits, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)]
    data = {"library": f"compressed-tensors {compressed_tensors.__version__}", "cases": cases}
    Path(__file__).with_suffix("").with_name("compressed_tensors.json").write_text(json.dumps(data) + "\n")
