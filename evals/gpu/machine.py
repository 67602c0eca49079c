"""What machine this is, which of our needs it has, and its ceilings: copies and large products."""

from __future__ import annotations

import importlib.util
import shutil

from timing import Results, gemm_rate, parse

NEEDED = ("numpy", "safetensors", "transformers", "tokenizers", "pytest", "triton", "click", "rich", "yaml", "pydantic")
PEERS = ("gemlite", "torchao", "flashinfer", "gptqmodel")
TOOLS = ("compute-sanitizer", "nvidia-smi", "nvcc")


def main() -> None:
    """Write machine.json."""
    arguments = parse()
    results = Results("machine", arguments)
    for kind, names in (("needed by a part", NEEDED), ("peers", PEERS)):
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        results.add(packages=kind, missing=", ".join(missing) or "none")
    results.add(tools="found", names=", ".join(name for name in TOOLS if shutil.which(name)) or "none")
    results.add(
        copy_terabytes=results.meta["copy_bandwidth"] / 1e12,
        gemm_teraflops=gemm_rate(256 if arguments.tiny else 8192, arguments.device) / 1e12,
        l2_megabytes=results.meta.get("l2_bytes", 0) / 2**20,
    )


main()
