"""What the cost table consists of: works, and who does them. Data; standard library only.

The model is two layers of TinyLlama-1.1B's shape with random weights, one layer for AutoRound; calibration ids are
random, the same for all. Every tool uses as many threads as it wants.
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
    """One row of the table, done by us and by peers.

    Args:
        name: of the work.
        title: as the page calls it.
        model: name of a shape in evals/checks/make_random_llama.py; "demo" = the bundled one.
        dtype: of its weights.
        samples, length: of calibration; ids each.
        recipe: shipped one that it starts from.
        changes: of the recipe, as `--set` takes them.
        target: of a search, None = a compression.
        jobs: method and options of evals/peers, by tool.
        of: work whose peers this one is compared with; its own, if empty.
        least, goal: share of the best peer's wall and CPU seconds; for a search, of an earlier one's.
        least_peak, goal_peak: share of that peer's memory.
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
    """Every work with every tool that does it, ours first."""
    for work in WORKS:
        yield from ((work, tool) for tool in (OURS, *work.jobs))


def key(work: Work, tool: str) -> str:
    """Names a row in the file of results."""
    return f"{work.name} {tool}"
