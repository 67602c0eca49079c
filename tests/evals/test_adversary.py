"""The adversary finds what is planted, and nothing in some seeded runs of the quick commands."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "evals" / "checks" / "adversary.py"
QUICK = "inspect,plan,plan shape,recipes"


def attack(*options):
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_leaves_what_the_next_draws_from_as_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    hostile = importlib.import_module("hostile")
    before, generator = repr(hostile.STRANGE), random.Random(0)
    for _ in range(300):
        path = tmp_path / "config.json"
        path.write_text('{"a": {"b": [1, {"c": "x"}]}, "d": {"e": {"f": 1}}}')
        hostile._structure(path, generator)
        assert path.stat().st_size < 1 << 29
    assert repr(hostile.STRANGE) == before


@pytest.mark.slow
@pytest.mark.parametrize("runs", [24])
def test_nothing_is_found_in_some_runs(runs):
    code, (*findings, summary) = attack("--commands", QUICK, "--runs", str(runs), "--seed", "300")
    assert (code, findings, summary["runs"]) == (0, [], runs)
    refused = sum(count for outcome, count in summary["outcomes"].items() if outcome.endswith(": 4"))
    assert refused > runs / 5  # what is changed is noticed


PLANTED = {
    "bug": "exit code 1",
    "canary": "touched ['work/thesis.txt']",
    "copy": "the user's file was copied",
    "hang": "hangs",
    "json": "stdout is not one JSON object",
    "link": "touched ['mine/sub/new.txt']",
    "memory": "MiB of memory",
    "signal": "exit code -11",
}


@pytest.mark.slow
def test_planted_defects_are_found():
    names = sorted(PLANTED)
    code, (*findings, _) = attack(
        *("--commands", "recipes", "--runs", str(len(names)), "--plant", ",".join(names), "--limit", "10")
    )
    assert code == 1
    for name, finding in zip(names, findings, strict=True):
        assert any(PLANTED[name] in text for text in finding["findings"]), finding
