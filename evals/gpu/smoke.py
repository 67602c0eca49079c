"""The self-test of a user's first load: a row for each family of kernels, and the seconds of two loads.

Other parts force the kernels; here the engine decides. Each family runs in a process of its own.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from timing import open_results, parse, rehearse

# isort: split
import torch

from quantkit.runtime.engine import kernel_check

MOST_SECONDS = {"first load": 65.0, "second load": 2.0}
# A child of the self-test in a rehearsal.
CHILD = "import smoke; smoke.shrink(); smoke.kernel_check.main()"


def shrink() -> None:
    """Have the self-test rehearse on the CPU, with small numbers and the first case of each family."""
    rehearse()
    firsts = {family: dict(list(cases.items())[:1]) for family, cases in kernel_check.CASES.items()}
    vars(kernel_check).update(WIDTH=128, _ROWS=(2,), CASES=firsts, _CHILD=CHILD, _SECONDS=600.0)
    vars(kernel_check).update(identity=lambda device: {"device": "cpu"})


def load(device: torch.device, kind: str) -> dict[str, Any]:
    """Check the kernels as a load does."""
    if kind == "first load":
        kernel_check.verdict_file(device).unlink(missing_ok=True)
    begun = time.perf_counter()
    kernel_check.check_kernels(device)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "in_time": seconds <= MOST_SECONDS[kind]}


def verdict(device: torch.device, family: str) -> dict[str, Any]:
    """Return what the load found of a family.

    Raises:
        AssertionError: its kernels failed.
    """
    found = kernel_check.read_verdicts(device)[family]
    assert found.passed, found.text
    return {"verdict": found.text}


def main() -> None:
    """Write smoke.json."""
    arguments = parse(75)
    results = open_results("smoke", arguments, row_seconds=70, share=1.0)
    device = torch.device(arguments.device)
    os.environ.pop("QUANTKIT_TRITON", None)
    if arguments.tiny:
        shrink()
    else:  # what is not done has a verdict that says so, before the part is ended
        vars(kernel_check).update(_SECONDS=min(60.0, arguments.seconds - 6))
    for kind in MOST_SECONDS:
        results.attempt(partial(load, device, kind), kind=kind)
    for family in kernel_check.CASES:
        results.attempt(partial(verdict, device, family), family=family)
    results.finish(is_wrong=any("error" in row for row in results.rows))


if __name__ == "__main__":
    main()
