"""A verification that two processes share: its report is that of one, but for times."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import quantkit
from quantkit.evaluate.data import read_named_text

ASKED = ("--suite", "none", "--tasks", "demo_facts,demo_answers", "--limit", "12", "--no-bench", "--sensitivity")


@pytest.mark.slow
def test_two_ranks_write_the_report_of_one(tmp_path):
    quantkit.quantize(recipe="rtn-int4", output=tmp_path / "made", device="cpu")
    (tmp_path / "text").write_text(read_named_text("demo", ())[:6000])

    def report(folder, *ranks):
        how = ("--text", "text", "--gate", "size_ratio<=0.01", "--threads", "1", "-o", folder, *ranks)
        command = [sys.executable, "-m", "quantkit", "verify", "made", *ASKED, *how, "--json"]
        done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, check=False)
        assert (done.returncode, json.loads(done.stdout)["held"]) == (3, False)  # told once
        written = json.loads((tmp_path / folder / "report.json").read_text())
        for side in ("evaluation", "baseline", "noise"):
            del written[side]["seconds"]
        del written["environment"]["created"], written["environment"]["command"]
        return written

    one = report("one")
    assert one["sensitivity"]["records"]
    assert report("two", "--nproc", "2") == one
