"""What a peer is asked to do, and what it says when it is done: one JSON on the command line, one as the last line.

The scripts beside this file run in environments of their own, in which the peer is installed and quantkit is not:

    python3 -m venv llmc && llmc/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python3 -m venv gptqmodel && gptqmodel/bin/pip install torch==2.13.0 setuptools wheel numpy \
        && gptqmodel/bin/pip install --no-build-isolation gptqmodel==7.6.0 optimum
    python3 -m venv autoround && autoround/bin/pip install torch==2.13.0 auto-round==0.16.1

`evals/cost/measure_cost.py` and `evals/accuracy/peers.py` take their Pythons as options.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """One quantization.

    Args:
        model, output: folders.
        ids: .jsonl file of {"input_ids": [...]}; all are used, all are of one length.
        method: as the script says.
        bits, group: of weights; group -1 = per channel.
        symmetric: whether there are no zero points.
        dtype: the model is read in, "auto" or a name of torch.
        options: of the method.
    """

    model: str
    output: str
    ids: str
    method: str
    bits: int = 4
    group: int = 128
    symmetric: bool = True
    dtype: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> list[list[int]]:
        """Token ids."""
        lines = Path(self.ids).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["input_ids"] for line in lines]


def read_job() -> Job:
    """The job on the command line."""
    return Job(**json.loads(sys.argv[1]))


def report(*packages: str) -> None:
    """Say that all went well.

    Args:
        packages: whose versions are said.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    # Of this program alone: what wait4 says of a child begins with what its parent had in memory.
    peak_mb = next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    names = (*packages, "torch", "transformers")
    print(json.dumps({"versions": {name: metadata.version(name) for name in names}, "peak_mb": peak_mb}), flush=True)
