"""The rows of the cost table as data: works, and the tools that do them; standard library only.

The model has two layers of TinyLlama-1.1B's shape (one layer for AutoRound) with random weights. The calibration ids
are random, and the same for all tools. Every tool uses its default number of threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_tools import AUTO_ROUND, GPTQ_MODEL, LLM_COMPRESSOR

OURS = "quantkit"
PLAIN: dict[str, Any] = {"steps": [{"gptq": {"damping": 0.01, "true_sequential": True}}]}
AUTOROUND: dict[str, Any] = {
    "model": "1b-1layer",
    "samples": 8,
    "length": 256,
    "recipe": "autoround-int4",
    "changes": {"steps": [{"autoround": {"iterations": 200, "batch_size": 1}}]},
    "jobs": {AUTO_ROUND: {"method": "signround", "options": {"iters": 200, "batch_size": 1}}},
    "least": 0.8,
    "goal": 0.6,
    "least_peak": 0.6,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A compression or search that quantkit and peers do, one row of the table for each tool.

    Args:
        name: name of the work.
        title: title on the page.
        model: name of a shape in evals/checks/make_random_llama.py; "demo" = the bundled model.
        dtype: dtype of the weights.
        samples, length: number of calibration sequences, and tokens in each.
        recipe: shipped recipe to start from.
        changes: fields of the recipe to replace.
        target: bits per weight of a search; None = a compression.
        jobs: method and options for evals/peers, keyed by tool.
        of: name of the work whose peers this work is compared with; empty = its own peers.
        least, goal: limit and goal for our wall and CPU seconds, as shares of the best peer's (of an earlier
            quantkit's, for a search).
        least_peak, goal_peak: limit and goal for our peak memory, as shares of that peer's; None = no limit.
    """

    name: str
    title: str
    model: str = "1b-2layers"
    dtype: str = "bfloat16"
    samples: int = 32
    length: int = 512
    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    of: str = ""
    least: float
    goal: float
    least_peak: float | None = None
    goal_peak: float | None = None


WORKS = (
    Work(
        name="gptq",
        title="`gptq-int4` as shipped",
        recipe="gptq-int4",
        jobs={LLM_COMPRESSOR: {"method": "gptq"}, GPTQ_MODEL: {"method": "gptq"}},
        least=0.75,
        goal=0.55,
        least_peak=0.7,
        goal_peak=0.6,
    ),
    Work(
        name="plain-gptq",
        title="plain GPTQ: `gptq-int4` with `asymmetric_calibration` 0",
        recipe="gptq-int4",
        changes=PLAIN,
        of="gptq",
        least=0.45,
        goal=0.35,
    ),
    Work(
        name="awq",
        title="`awq-int4`",
        samples=8,
        recipe="awq-int4",
        jobs={
            LLM_COMPRESSOR: {"method": "awq", "symmetric": False},
            AUTO_ROUND: {"method": "awq", "symmetric": False, "options": {"format": "auto_round:auto_awq"}},
        },
        least=0.45,
        goal=0.35,
    ),
    Work(
        name="autoround",
        title="`autoround-int4`, 200 iterations of one sequence of 256, one layer",
        **AUTOROUND,
    ),
    Work(
        name="autoround-float32",
        title="`autoround-int4` of a model in float32, 200 iterations, one layer",
        dtype="float32",
        **AUTOROUND,
    ),
    Work(
        name="search",
        title="`search --bits 4.5` on the demo model",
        model="demo",
        recipe="gptq-int4",
        target="4.5",
        least=0.4,
        goal=0.2,
    ),
)


def rows() -> Iterator[tuple[Work, str]]:
    """Yield every work with every tool that does it, quantkit first."""
    for work in WORKS:
        yield from ((work, tool) for tool in (OURS, *work.jobs))


def key(work: Work, tool: str) -> str:
    """Return the name of a row in a file of results."""
    return f"{work.name} {tool}"
