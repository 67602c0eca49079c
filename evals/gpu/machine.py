"""What machine this is, which peers and tools it has, and its ceilings: copies and large products."""

from __future__ import annotations

import importlib.util
import shutil

from timing import gemm_rate, open_results, parse

PEERS = ("gemlite", "torchao", "flashinfer", "gptqmodel")
TOOLS = ("compute-sanitizer", "nvidia-smi", "nvcc", "git")


def main() -> None:
    """Write machine.json."""
    arguments = parse()
    results = open_results("machine", arguments)
    results.rows = []
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    results.add(peers="missing", names=", ".join(missing) or "none")
    results.add(tools="found", names=", ".join(name for name in TOOLS if shutil.which(name)) or "none")
    results.add(
        copy_terabytes=results.meta["copy_bandwidth"] / 1e12,
        gemm_teraflops=gemm_rate(256 if arguments.tiny else 8192, arguments.device) / 1e12,
        l2_megabytes=results.meta.get("l2_bytes", 0) / 2**20,
    )
    results.finish()


if __name__ == "__main__":
    main()
