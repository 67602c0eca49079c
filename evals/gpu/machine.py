"""What machine this is, which of our needs it has, and its ceilings: copies and large products."""

from __future__ import annotations

import importlib.util

from timing import Results, gemm_rate, parse

NEEDED = ("numpy", "safetensors", "transformers", "tokenizers", "pytest", "triton", "click", "rich", "yaml")
OPTIONAL = ("pydantic", "compressed_tensors", "datasets", "lm_eval", "accelerate")


def main() -> None:
    """Write machine.json."""
    arguments = parse()
    results = Results("machine", arguments)
    for kind, names in (("needed by a part", NEEDED), ("not needed here", OPTIONAL)):
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        results.add(packages=kind, missing=", ".join(missing) or "none")
    if arguments.device == "cuda":
        results.add(
            copy_terabytes=results.meta["copy_bandwidth"] / 1e12,
            gemm_teraflops=gemm_rate() / 1e12,
            l2_megabytes=results.meta["l2_bytes"] / 2**20,
        )
    results.save()


main()
