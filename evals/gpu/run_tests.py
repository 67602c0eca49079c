"""The tests that need a GPU, most telling first: a row for each as it ends, and for one that ended its process.

Most of their time is Triton's compiler, hence several processes. In a rehearsal a file of the interpreter's tests
stands for them.
"""

from __future__ import annotations

import os
import sys

import pytest
from results import GO_ON, Results
from timing import ROOT, is_lost, open_results, parse, refuse_torch

ON_GPU, INTERPRETED = "tests/kernels/gpu/test_on_gpu.py", "tests/kernels/gpu/interpreted/test_norms.py"
# Words in names of tests, in the order in which they run; all others come last.
ORDER = ("engine", "graphs", "bfloat16", "attention", "drafts", "heads", "draws", "experts", "norms", "rotary", "gated")
TEST_SECONDS = 90


def pytest_configure() -> None:
    """What torch computes is no test of a kernel."""
    refuse_torch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what has a row, and sort the rest: in every process alike."""
    known = set(os.environ["KNOWN_TESTS"].split("\n"))
    items[:] = sorted((item for item in items if item.nodeid not in known), key=_rank)


def pytest_runtest_teardown() -> None:
    """A process whose device is lost ends, so that the next test has another one."""
    if is_lost():
        os._exit(1)


def _rank(item: pytest.Item) -> int:
    name = item.name.partition("[")[0]
    return next((rank for rank, word in enumerate(ORDER) if word in name), len(ORDER))


class Recorder:
    """A plugin of the process that hands out the tests.

    Args:
        results: gets the rows.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A row for what has ended, and no further test once the time is over."""
        if report.passed and report.when != "call":
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            said = report.longreprtext.strip().splitlines() or ["no word"]
            print("\n".join(said[-40:]), flush=True)
            row["error"] = said[-1][:200]
        self._results.add(**row)
        if self._results.is_over():
            pytest.exit("the time is over", returncode=GO_ON)


def main() -> None:
    """Write tests.json."""
    arguments = parse(130)
    results = open_results("tests", arguments)
    os.environ["KNOWN_TESTS"] = "\n".join(row["test"] for row in results.rows)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    options = ["-o", "addopts=", "-o", "required_plugins=", "-o", f"faulthandler_timeout={TEST_SECONDS}"]
    options += ["-o", "faulthandler_exit_on_timeout=true", "-q", "--tb=short", "-p", "no:cacheprovider"]
    workers = 1 if arguments.device == "cpu" else os.cpu_count()
    options += ["-p", "xdist", "-p", "run_tests", "-n", str(workers), "--maxschedchunk", "1"]
    chosen = ["-m", "not slow", INTERPRETED] if arguments.device == "cpu" else ["-m", "gpu", ON_GPU]
    code = pytest.main([*options, *chosen], plugins=[Recorder(results)])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED, GO_ON):
        results.finish()
    sys.exit(int(code))


if __name__ == "__main__":
    main()
