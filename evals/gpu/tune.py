"""What `quantkit tune` chooses for an 8B Llama in the time there is; writes tune.json as kernels read it.

What its file has is kept, so that the next call goes on.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from results import GO_ON, folder
from timing import dtype_on, parse

from quantkit.benchmark import tune as tuning
from quantkit.benchmark.options import TuneOptions
from quantkit.benchmark.tune import Outcome
from quantkit.benchmark.tune_cases import Shapes, cases_of
from quantkit.benchmark.tune_device import tune_device, versions
from quantkit.benchmark.tune_problems import opener
from quantkit.kernels.gpu import spaces
from quantkit.kernels.gpu.tuned import TunedTable
from quantkit.numerics.dtype import INT4
from quantkit.numerics.scheme import LinearScheme, WeightScheme

OPTIONS = TuneOptions(shapes=("8B",), rows=(1, 16), batches=(32,), kv_types=("auto", "int8", "int4"))
TINY = Shapes(
    linears=((64, 512, LinearScheme(weight=WeightScheme(dtype=INT4, group_size=128))),),
    query_heads=4,
    kv_heads=2,
    head_dim=32,
)


def report(outcome: Outcome | None, number: int, total: int) -> None:
    """A line for each case."""
    if outcome is not None:
        summary = outcome.problem if outcome.entry is None else f"{outcome.entry.ratio:.3f} {outcome.entry.choice}"
        print(f"{number}/{total} {outcome.case.label}: {summary}, dropped {outcome.dropped or 'none'}", flush=True)


def rehearse(seconds: float, path: Path) -> int:
    """The same through Triton's interpreter, few candidates and samples: whatever is fastest there says nothing."""
    spaces.refined = lambda choice: []
    tuning._FIRST_SAMPLES, tuning._LAST_SAMPLES = 1, 3
    small = TuneOptions(rows=(1, 5), batches=(1,), context=40, kv_types=("int8",))
    few = [replace(case, candidates=case.candidates[-1:]) for case in cases_of([TINY], small, chip=0)]
    fresh = TunedTable(device="Triton's interpreter", capability=0, versions=versions(), entries=(), path=path)
    problems = opener(torch.device("cpu"), dtype_on("cpu"))
    made = tuning.tune(few, problems, fresh, seconds=seconds, report=report)
    print(f"{len(made.outcomes)} of {len(few)} cases, {made.num_left} left")
    assert all(outcome.entry is not None and not outcome.dropped for outcome in made.outcomes), made.outcomes
    return made.num_left


def main() -> int:
    """Tune, or rehearse it; the exit code says whether something is left for the next call."""
    arguments = parse()
    path = folder() / "tune.json"
    if arguments.device == "cpu":
        with torch.inference_mode():
            return GO_ON if rehearse(arguments.seconds, path) else 0
    made = tune_device(replace(OPTIONS, seconds=arguments.seconds, output=path), report=report)
    print(f"{len(made.outcomes)} cases, {made.num_left} left; {path}")
    return GO_ON if made.num_left else 0


if __name__ == "__main__":
    sys.exit(main())
