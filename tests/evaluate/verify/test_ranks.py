"""A verification that two processes share: its report is that of one, but for times."""

from __future__ import annotations

import json
import subprocess

import pytest

import quantkit
from quantkit.cli import main
from quantkit.evaluate import work_sharing
from quantkit.evaluate.tasks import read_named_text
from quantkit.machine.system import QUANTKIT, python

ASKED = ("--suite", "none", "--tasks", "demo_facts,demo_answers", "--limit", "32", "--no-bench", "--sensitivity")


@pytest.mark.slow
def test_two_ranks_write_the_report_of_one(tmp_path, monkeypatch, capsys):
    quantkit.quantize(recipe="rtn-int4", output=tmp_path / "made", device="cpu")
    (tmp_path / "text").write_text(read_named_text("demo", ())[:1200])
    monkeypatch.chdir(tmp_path)
    words = ["verify", "made", *ASKED, "--text", "text", "--gate", "size_ratio<=0.01", "--threads", "1", "--json"]

    def check(code, stdout):
        assert (code, json.loads(stdout)["held"]) == (3, False)  # told once

    def report(folder):
        written = json.loads((tmp_path / folder / "report.json").read_text())
        for side in ("evaluation", "baseline", "noise"):
            del written[side]["seconds"]
        del written["environment"]["created"], written["environment"]["command"]
        return written

    cut, batches = work_sharing.cut, []
    monkeypatch.setattr(work_sharing, "cut", lambda *sizes: batches.append(parts := cut(*sizes)) or parts)
    with pytest.raises(SystemExit) as ended:
        main([*words, "-o", "one"])
    assert max(map(len, batches)) > 1  # so that two ranks have something to share
    check(ended.value.code, capsys.readouterr().out)
    (tmp_path / "numpy.py").write_text("raise SystemExit('a stranger')")
    command = [*python(QUANTKIT), *words, "-o", "two", "--nproc", "2"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    check(done.returncode, done.stdout)
    one = report("one")
    assert one["sensitivity"]["records"]
    assert report("two") == one
