"""Under a limit on memory (`ulimit -v`) every command ends with exit code 5 and one line, whatever its libraries do."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from quantkit.demo import DEMO_MODEL


@pytest.mark.parametrize("kib", [300_000, 500_000, 570_000])
def test_an_import_that_does_not_fit_is_one_line(kib):
    limit = kib << 10
    done = subprocess.run(
        [sys.executable, "-m", "quantkit", "inspect", str(DEMO_MODEL)],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr.startswith("error: out of memory: ")
    assert done.stderr.count("\n") == 1
