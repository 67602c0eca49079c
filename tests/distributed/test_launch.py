"""Processes that torch's launcher starts: a program as Python runs it, and one exit code."""

from __future__ import annotations

import os

import pytest

from quantkit.distributed import launch

PROGRAM = """
import atexit, os, sys
from pathlib import Path
from quantkit.distributed import gather, joined, rank

folder, code = Path(sys.argv[1]), int(sys.argv[2])
with joined(lambda error: (1, str(error))):
    words = gather(f"{__name__} {rank()}")
    atexit.register(lambda number=rank(): (folder / str(number)).write_text(" ".join(words)))
sys.exit(code)
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_runs_to_its_end_in_each_process(tmp_path, code):
    (tmp_path / "program.py").write_text(PROGRAM)
    before = dict(os.environ)
    assert launch(2, [str(tmp_path), str(code)], program=(str(tmp_path / "program.py"),)) == code
    assert [(tmp_path / str(number)).read_text() for number in range(2)] == ["__main__ 0 __main__ 1"] * 2
    assert dict(os.environ).items() >= before.items()
